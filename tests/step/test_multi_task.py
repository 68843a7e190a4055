"""MultiTask: tasks that take turns on one state, each with its data, loss and metrics."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from loops import assert_close, waves

import flaxfit as ff

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 4)).astype("f4")
KINDS, SIZES = RNG.integers(0, 3, 24), RNG.normal(size=(24, 2)).astype("f4")
SGD = optax.sgd(0.1)


class TwoHeads(nn.Module):
    def setup(self):
        self.trunk = nn.Dense(5, kernel_init=waves)
        self.kind_head = nn.Dense(3, kernel_init=waves)
        self.size_head = nn.Dense(2, kernel_init=waves)

    def kind(self, x):
        return self.kind_head(nn.tanh(self.trunk(x)))

    def size(self, x):
        return self.size_head(nn.tanh(self.trunk(x)))

    def __call__(self, x):
        return self.kind(x), self.size(x)


MODULE = TwoHeads()


def make_tasks(**options):
    data = {
        "kind": ff.ArrayStream(X, KINDS, batch_size=8, shuffle=True),
        "size": ff.ArrayStream(X[:20], SIZES[:20], np.arange(20), batch_size=12, seed=1),
    }
    losses, metrics = {"kind": "crossentropy", "size": "mse"}, {"kind": "accuracy", "size": "mae"}
    return {
        name: ff.TrainTask(
            functools.partial(MODULE.apply, method=name),
            SGD,
            losses[name],
            data[name],
            [metrics[name]],
            **options,
        )
        for name in data
    }


def make_loop(tasks=None, weights=None, **options):
    task = ff.MultiTask(tasks or make_tasks(), weights=weights)
    options = {"n_steps": 6, "stdout": False, **options}
    return ff.TrainLoop(MODULE.init, task, 0, **options)


def close(one, other):
    assert_close(one.params, other.params, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_turns_are_the_steps_of_each_task_by_hand():
    loop = make_loop(n_steps_per_checkpoint=3, first_checkpoint=3)
    state, tasks = loop.state, make_tasks()
    steps = {name: jax.jit(ff.make_train_step(task)) for name, task in tasks.items()}
    values = {}
    for i in range(3):
        name = "size" if i % 2 else "kind"
        batch = next(tasks[name].data)
        batch = ff.Batch((batch[0],), (batch[1],), *batch[2:])
        state, sums = steps[name](state, batch)
        values.setdefault(name, []).append([float(part) for part in sums["loss"]])
    checkpoint = next(loop)
    close(checkpoint.state, state)
    totals = {name: np.sum(each, 0) for name, each in values.items()}
    for name, (loss, weight) in totals.items():
        assert checkpoint.metrics[f"{name}/loss"] == pytest.approx(loss / weight, rel=1e-5)
    loss, weight = np.sum(list(totals.values()), 0)
    assert checkpoint.loss == pytest.approx(loss / weight, rel=1e-5)
    assert {"kind/accuracy", "size/mae", "kind/grad_norm"} <= checkpoint.metrics.keys()


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, {"size": 3.0}], ids=["in turns", "drawn"])
def test_a_run_goes_on_exactly_where_it_was(weights):
    whole = list(make_loop(weights=weights))
    loop = make_loop(weights=weights)
    checkpoint = [loop.next_step() for _ in range(3)][-1]
    other = make_loop(weights=weights)
    other.restore(checkpoint)
    rest = list(other)
    assert [each.step for each in rest] == [4, 5, 6]
    for one, again in zip(whole[3:], rest, strict=True):
        assert one.data_state == again.data_state
        jax.tree.map(np.testing.assert_array_equal, one.state.params, again.state.params)
        np.testing.assert_equal(one.metrics, again.metrics)


def test_weights_say_how_often_a_task_is_trained():
    stream = ff.MultiTask(make_tasks(), weights={"size": 3.0}, seed=4).data
    names = [next(stream).targets[0].name for _ in range(400)]
    assert 0.7 < names.count("size") / 400 < 0.8
    again = ff.MultiTask(make_tasks(), weights={"size": 3.0}, seed=4).data
    assert [next(again).targets[0].name for _ in range(400)] == names


def test_a_position_of_other_tasks_is_refused():
    state = ff.MultiTask(make_tasks()).data.get_state()
    with pytest.raises(ValueError, match="other tasks, weights or another seed"):
        ff.MultiTask(make_tasks(), seed=1).data.set_state(state)


def test_what_is_wrong_with_any_task_is_found_at_the_first_step():
    tasks = make_tasks()
    wrong = ff.TrainTask(tasks["size"].apply, SGD, "crossentropy", tasks["size"].data)
    with pytest.raises(ValueError, match="'crossentropy' expects integer labels"):
        make_loop({"kind": tasks["kind"], "size": wrong}).next_step()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tasks: ff.MultiTask(tasks, weights={"weight": 1}), "weights contains 'weight'"),
        (lambda tasks: ff.MultiTask(tasks, weights={"kind": 0}), "must be greater than 0"),
        (lambda tasks: ff.MultiTask({}), "at least one task"),
        (
            lambda tasks: ff.MultiTask(make_tasks(ema=0.9)),
            "Options of the task 'kind' change its optimizer",
        ),
        (
            lambda tasks: ff.MultiTask(
                {**tasks, "other": ff.TrainTask(MODULE.apply, optax.sgd(0.2), "mse")}
            ),
            "different optimizers",
        ),
        (
            lambda tasks: ff.MultiTask({**tasks, "own": ff.TrainTask(step=print, optimizer=SGD)}),
            "'own' have custom steps",
        ),
    ],
    ids=["unknown", "zero", "none", "options", "optimizers", "own step"],
)
def test_tasks_that_cannot_share_a_state_are_refused(change, message):
    tasks = make_tasks()
    with pytest.raises(ValueError, match=message):
        change(tasks)


@pytest.mark.slow
def test_targets_of_weight_zero_may_be_anything():
    sizes, weights = SIZES.copy(), np.arange(24) % 4
    sizes[::4] = np.nan
    task = ff.TrainTask(
        functools.partial(MODULE.apply, method="size"), SGD, "mse", [(X, sizes, weights)]
    )
    loop = ff.TrainLoop(MODULE.init, ff.MultiTask({"size": task}), 0, stdout=False)
    assert np.isfinite(loop.next_step().metrics["loss"])
