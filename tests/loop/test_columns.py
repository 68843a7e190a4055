"""Batches that are mappings train as the same batches in `(x, y)` form, bit for bit."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from loops import OPTIMIZER, Regressor, X, Y, assert_equal, init_of, make_loop
from marks import quick, slow, thorough, usual
from strategies import options_of_loops

import flaxfit as ff
from flaxfit.data import prefetch
from flaxfit.step._multi_task import MultiTask

W = np.linspace(0.5, 1.5, len(X), dtype=np.float32)
NAMES = [str(i) for i in range(len(X))]
COLUMNS = {"image": X, "weight": W, "name": NAMES, "label": Y}
OPTIONS = {"inputs": "image", "targets": "label", "weights": "weight"}


def cut(data, size=16):
    """The batches of a data set, given as a pair or a mapping."""
    starts = range(0, len(X), size)
    if isinstance(data, tuple):
        return [tuple(part[i : i + size] for part in data) for i in starts]
    return [{name: part[i : i + size] for name, part in data.items()} for i in starts]


def make_task(data, **options):
    module = Regressor(0.3)
    return ff.TrainTask(module.apply, OPTIMIZER, "mse", data, ["mae"], **options)


def loop_of(task, **options):
    return make_loop(Regressor(0.3), task=task, **options)


def states(task, n=6, **options):
    loop = loop_of(task, n_steps=n, **options)
    return [(checkpoint.state, np.float64(checkpoint.loss)) for checkpoint in loop]


def arrays(columns, **options):
    return ff.ArrayStream({k: v for k, v in columns.items() if k != "name"}, **options)


FORMS = {
    "mapping": (lambda c: c, lambda x, y, w: (x, y, w)),
    "batches": (cut, lambda *parts: cut(parts)),
    "prefetched": (lambda c: prefetch(cut(c)), lambda *parts: cut(parts)),
    "callable": (lambda c: lambda: iter(cut(c)), lambda *parts: cut(parts)),
    "stream": (
        lambda c: arrays(c, batch_size=16, shuffle=True),
        lambda *parts: ff.ArrayStream(*parts, batch_size=16, shuffle=True),
    ),
    "not resident": (
        lambda c: arrays(c, batch_size=16, resident=False),
        lambda *parts: ff.ArrayStream(*parts, batch_size=16, resident=False),
    ),
}


@pytest.mark.parametrize(
    "form",
    [
        "mapping",
        *(slow(name) for name in ("batches", "stream", "not resident")),
        *(thorough(name) for name in ("prefetched", "callable")),  # They resume or measure, below.
    ],
)
def test_every_form_of_data_trains_as_in_pairs(form):
    by_name, in_parts = FORMS[form]
    n = 4 if form in ("batches", "prefetched", "callable") else 6
    expected = states(make_task(in_parts(X, Y, W)), n)
    assert_equal(states(make_task(by_name(COLUMNS), **OPTIONS), n), expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", thorough("data parallel")])
def test_every_strategy_takes_them(strategy):
    loops = {"devices": None, "n": 4, **options_of_loops()[strategy]}
    expected = states(make_task(cut((X, Y, W), 20)), **loops)
    assert_equal(states(make_task(cut(COLUMNS, 20), **OPTIONS), **loops), expected)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["mapping", thorough("batches")])
def test_several_steps_per_call_take_them(form):
    task = make_task(FORMS[form][0](COLUMNS), **OPTIONS)
    expected = states(task, 3)
    several = {"steps_per_call": 2, "n_steps_per_checkpoint": 2}
    assert_equal(states(task, 3, **several)[-1][0], expected[-1][0])


@pytest.mark.slow
@pytest.mark.parametrize("form", usual("prefetched", "stream", of=FORMS))
def test_a_run_resumes_at_its_position(form):
    data = FORMS[form][0]
    first = loop_of(make_task(data(COLUMNS), **OPTIONS))
    saved = [first.next_checkpoint() for _ in range(3)][1]
    again = loop_of(make_task(data(COLUMNS), **OPTIONS))
    again.restore(saved)
    assert_equal(again.next_checkpoint().state, first.state)


@pytest.mark.slow
def test_a_given_batch_and_a_sample_of_the_inputs_may_have_columns():
    task = make_task(None, **OPTIONS)
    given = (COLUMNS, COLUMNS), ({"image": X}, (X, Y, W)), (X, (X, Y, W))
    steps = [loop_of(task, input_sample=sample).next_step(batch) for sample, batch in given]
    for step in steps[1:]:
        assert_equal(step.state, steps[0].state)


@pytest.mark.slow
def test_inputs_by_the_names_of_the_call():
    class TwoInputs(nn.Module):
        @nn.compact
        def __call__(self, tokens, mask, train: bool):
            return nn.Dense(1)(tokens * mask)[:, 0]

    mask = (X > 0).astype(np.float32)
    inputs = {"tokens": X, "mask": mask}

    def states(data, **names):
        task = ff.TrainTask(TwoInputs(), optax.sgd(0.1), "mse", data, **names)
        loop = ff.TrainLoop(TwoInputs(), task, 0, n_steps=2, stdout=False)
        return [checkpoint.state for checkpoint in loop]

    expected = states((inputs, Y))
    renamed = {"ids": X, "ones": mask, "id": NAMES, "size": Y}
    by_name = {"inputs": {"tokens": "ids", "mask": "ones"}, "targets": "size"}
    for columns, names in (
        ({**inputs, "labels": Y}, {}),
        ({**inputs, "labels": Y, "id": NAMES}, {"targets": "labels"}),
        (renamed, by_name),
        (renamed, {**by_name, "inputs": ("ids", "ones")}),
    ):
        assert_equal(states(columns, **names), expected)


@pytest.mark.parametrize(
    "make",
    [
        slow(lambda: nn.Dense(1)),
        slow(lambda: nn.Sequential([nn.Dense(1)])),
        lambda: nnx.Linear(5, 1, rngs=nnx.Rngs(0)),
        slow(lambda: nnx.Sequential(nnx.Linear(5, 1, rngs=nnx.Rngs(0)))),
        slow(lambda: lambda rngs: nnx.Linear(5, 1, rngs=rngs)),
    ],
)
def test_usual_names_need_no_word(make):
    module = make()
    task = ff.TrainTask(module, optax.sgd(0.1), "mse", {"image": X, "label": Y[:, None]})
    loop = ff.TrainLoop(module, task, 0, stdout=False)
    bias, kernel = sorted(map(np.asarray, jax.tree.leaves(loop.state.params)), key=np.ndim)
    expected = np.mean((X[:32] @ kernel + bias - Y[:32, None]) ** 2)
    assert loop.next_step().loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("form", quick("batches", of=FORMS))
def test_evaluation_takes_them(form):
    state = ff.InferenceState(np.int32(0), init_of(Regressor())(None, X)["params"], {})
    by_name, in_parts = FORMS[form]
    apply = Regressor().apply
    expected = ff.EvalLoop(ff.EvalTask(apply, ["mae"], in_parts(X, Y, W), loss="mse"))
    evaluate = ff.EvalLoop(ff.EvalTask(apply, ["mae"], by_name(COLUMNS), loss="mse", **OPTIONS))
    assert evaluate.measure(state) == expected.measure(state)
    if form != "prefetched":
        assert evaluate.measure(state, by_name(COLUMNS)) == expected.measure(state)


@pytest.mark.slow
def test_tasks_that_take_turns_have_columns_of_their_own():
    def apply(variables, x, **_):
        return variables["params"] * x, {}

    sgd, x = optax.sgd(0.1), X[:, :1]
    own = {
        "up": ff.TrainTask(apply, sgd, "mse", {"a": x, "b": x}, inputs="a", targets="b"),
        "down": ff.TrainTask(apply, sgd, "mse", [{"c": x, "d": -x}], inputs="c", targets="d"),
    }
    pairs = {
        "up": ff.TrainTask(apply, sgd, "mse", (x, x)),
        "down": ff.TrainTask(apply, sgd, "mse", [(x, -x)]),
    }

    def losses(tasks):

        def init(rngs, x):
            return {"params": np.zeros(1, np.float32)}

        loop = ff.TrainLoop(init, MultiTask(tasks), 0, n_steps=2, stdout=False)
        return [checkpoint.loss for checkpoint in loop]

    assert losses(own) == losses(pairs)


def init_dense(rngs, *inputs, **named):
    return {"params": {"kernel": np.ones((5, 1), np.float32), "bias": np.zeros(1, np.float32)}}


@pytest.mark.optimized  # It found that the newest JAX leaves out arguments in another way.
def test_a_step_of_ones_own_gets_the_columns_as_before_or_by_name():
    seen = []

    def step(state, batch):
        seen.append(batch)
        return state, {"loss": 0.0}

    data = [{"obs": X, "label": Y}]
    for options in {}, {"inputs": "obs"}:
        task = ff.TrainTask(nn.Dense(1), step=step, data=data, **options)
        ff.TrainLoop(init_dense, task, 0, stdout=False).next_step()
    assert seen[0].inputs.keys() == {"obs", "label"} and seen[0].targets == ()
    assert len(seen[-1].inputs) == len(seen[-1].targets) == 1


@pytest.mark.slow
def test_an_objective_gets_the_columns_as_before_or_by_name():
    seen = []

    def objective(apply, batch, rngs):
        seen.append(batch)
        chosen = batch.inputs["chosen"] if isinstance(batch.inputs, dict) else batch.inputs[0]
        return apply(chosen)[:, 0]

    data = [{"chosen": X, "rejected": -X}]
    for options in {}, {"inputs": ("chosen", "rejected")}:
        task = ff.TrainTask(nn.Dense(1), optax.sgd(0.1), data=data, objective=objective, **options)
        checkpoint = ff.TrainLoop(init_dense, task, 0, stdout=False).next_step()
        evaluate = ff.EvalTask(nn.Dense(1), [], data, objective=objective, **options)
        assert np.isfinite(ff.EvalLoop(evaluate).measure(checkpoint.state)["loss"])
    assert seen[0].inputs.keys() == {"chosen", "rejected"}
    assert len(seen[-1].inputs) == 2


def test_a_missing_column_is_refused_at_its_batch():
    data = [*cut(COLUMNS)[:2], {"image": X}]
    loop = make_loop(task=make_task(data, **OPTIONS))
    loop.next_step()
    loop.next_step()
    with pytest.raises(ValueError, match="lacks the column 'label'"):
        loop.next_step()


@pytest.mark.parametrize("make", [ff.TrainTask, ff.EvalTask])
def test_a_task_refuses_what_is_no_name(make):
    given = {"optimizer": optax.sgd(0.1), "loss": "mse"} if make is ff.TrainTask else {}
    metrics = {"metrics": ["mae"]}
    with pytest.raises(TypeError, match=f"{make.__name__}: targets names the columns"):
        make(nn.Dense(1).apply, **given, **metrics, targets=Y)
