"""Companions are checked when a task is made, against the names that its objective takes."""

import dataclasses
import functools

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import flaxfit as ff

MODULE = nn.Dense(1)
VARIABLES = {"params": {"kernel": np.ones((2, 1), np.float32), "bias": np.zeros(1, np.float32)}}
PAIR = (MODULE, VARIABLES)


def objective(apply, batch, rngs, teacher):
    return apply(*batch.inputs)[:, 0]


def task_of(companions, objective=objective, **options):
    return ff.TrainTask(
        MODULE, optax.sgd(0.1), objective=objective, companions=companions, **options
    )


def refuses(companions, error, message):
    for make in (
        lambda: task_of(companions),
        lambda: ff.EvalTask(MODULE, (), objective=objective, companions=companions),
    ):
        with pytest.raises(error, match=message):
            make()


@pytest.mark.parametrize(
    ("companions", "error", "message"),
    [
        ([PAIR], TypeError, "must be a mapping by name"),
        ({"the teacher": PAIR}, ValueError, "name of a companion .* got 'the teacher'"),
        ({"class": PAIR}, ValueError, "name of a companion .* got 'class'"),
        ({"batch": PAIR}, ValueError, "A companion cannot be called 'batch'"),
        ({"ema": PAIR}, ValueError, "A companion cannot be called 'ema'"),
        ({"teacher": PAIR, "judge": PAIR}, ValueError, "no parameter for the companions judge"),
        ({}, ValueError, "parameters for the companions teacher, but there is none"),
    ],
)
def test_companions_that_the_objective_cannot_be_given_are_refused(companions, error, message):
    refuses(companions, error, message)


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (MODULE, "must be .apply, variables., .Linen module"),
        (nnx.Linear, "must be .apply, variables., .Linen module"),
        ((3, VARIABLES), "needs a module or an apply"),
        ((MODULE, VARIABLES["params"]), "needs variables such as {'params': ...}"),
        (
            (MODULE, ff.InferenceState(np.int32(0), VARIABLES["params"], {})),
            "needs variables (?s:.*) Give state.variables",
        ),
        ((MODULE, jax.eval_shape(lambda: VARIABLES)), "and params/bias is ShapeDtypeStruct"),
        ((MODULE, {**VARIABLES, "stats": {"a": "text"}}), "of numbers, and stats/a is 'text'"),
        ((MODULE, {**VARIABLES, "stats": np.array(["text"])}), "of numbers, and stats is array"),
        (ff.Model(MODULE, optax.sgd(0.1), "mse"), "NNX class, variables.*model.state.variables"),
    ],
)
def test_what_is_no_companion_is_refused_in_words(teacher, message):
    refuses({"teacher": teacher}, TypeError, f"companion 'teacher' .*{message}")


def test_they_need_an_objective():
    with pytest.raises(ValueError, match=r"need an objective.* TrainTask\(objective=f"):
        ff.TrainTask(MODULE, optax.sgd(0.1), "mse", companions={"teacher": PAIR})
    for options in {}, {"step": lambda state, batch: (state, {})}:
        with pytest.raises(ValueError, match="save_companions.* would have no effect"):
            ff.TrainTask(MODULE, optax.sgd(0.1), "mse", save_companions=True, **options)
    with pytest.raises(TypeError, match="save_companions must be True or False, got 'teacher'"):
        task_of({"teacher": PAIR}, save_companions="teacher")
    with pytest.raises(ValueError, match="companions would have no effect"):
        ff.TrainTask(step=lambda state, batch: (state, {}), companions={"teacher": PAIR})


def test_an_objective_takes_them_in_any_way_that_python_has():
    class Callable:
        def __call__(self, apply, batch, rngs, *, teacher, weight=0.5):
            return apply(*batch.inputs)[:, 0]

    def any_name(apply, batch, rngs, **named):
        return apply(*batch.inputs)[:, 0]

    bound = functools.partial(lambda apply, batch, rngs, t, teacher: 0, t=0.5)
    for each in (Callable(), any_name, bound):
        assert [*task_of({"teacher": PAIR}, each).companions] == ["teacher"]


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.dropout = nnx.Linear(2, 1, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


def test_a_module_of_nnx_brings_its_variables_and_is_called_in_evaluation_mode():
    module, x = Dropping(nnx.Rngs(0)), np.ones((16, 2), np.float32)
    (companion,) = task_of({"teacher": module}).companions.values()
    assert companion.variables["params"]["linear"]["kernel"].shape == (2, 1)
    np.testing.assert_allclose(companion.apply(companion.variables, x), module.linear(x), rtol=1e-6)


def test_a_task_with_other_fields_has_the_same_ones():
    task = task_of({"teacher": PAIR})
    other = dataclasses.replace(task, freeze="bias")
    assert other.companions is task.companions
    assert ff.EvalTask(MODULE, (), objective=objective, companions=task.companions).companions is (
        task.companions
    )


def test_tasks_that_take_turns_have_none():
    task = task_of({"teacher": PAIR}, data=[np.ones((2, 2), np.float32)])
    with pytest.raises(ValueError, match="tasks 'a' have companions"):
        ff.MultiTask({"a": task})
