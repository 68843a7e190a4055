"""Companions are checked when a task is made, against the names that its objective takes."""

import dataclasses
import functools

import flax.linen as nn
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


@pytest.mark.parametrize(
    ("companions", "error", "message"),
    [
        ([PAIR], TypeError, "must be a mapping by name"),
        ({"the teacher": PAIR}, ValueError, "name of a companion .* got 'the teacher'"),
        ({"class": PAIR}, ValueError, "name of a companion .* got 'class'"),
        ({"batch": PAIR}, ValueError, "No companion can be called 'batch'"),
        ({"ema": PAIR}, ValueError, "No companion can be called 'ema'"),
        ({"teacher": PAIR, "judge": PAIR}, ValueError, "takes no judge"),
        ({}, ValueError, "asks for teacher, and there are the companions of no name"),
        ({"teacher": MODULE}, TypeError, "'teacher' must be .apply, variables., .linen module"),
        ({"teacher": nnx.Linear}, TypeError, "'teacher' must be .apply, variables., .linen module"),
        ({"teacher": (3, VARIABLES)}, TypeError, "companion 'teacher' needs a module or an apply"),
        (
            {"teacher": (MODULE, VARIABLES["params"])},
            TypeError,
            "'teacher' needs variables such as {'params': ...}",
        ),
    ],
)
def test_what_is_no_companion_is_refused_in_words(companions, error, message):
    with pytest.raises(error, match=message):
        task_of(companions)
    with pytest.raises(error, match=message):
        ff.EvalTask(MODULE, (), objective=objective, companions=companions)


def test_they_need_an_objective():
    with pytest.raises(ValueError, match=r"need an objective.* TrainTask\(objective=f"):
        ff.TrainTask(MODULE, optax.sgd(0.1), "mse", companions={"teacher": PAIR})
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


def test_a_module_of_nnx_brings_its_variables():
    (companion,) = task_of({"teacher": nnx.Linear(2, 1, rngs=nnx.Rngs(0))}).companions.values()
    assert companion.variables["params"]["kernel"].shape == (2, 1)


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
