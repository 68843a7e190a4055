"""Trial: the number of steps per dispatch that it finds out, and that nothing else changes."""

import itertools

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import flaxfit as ff
from flaxfit.loop import _trial
from flaxfit.loop._consistency import Consistency
from flaxfit.loop._stepper import Stepper
from flaxfit.loop._trial import several

random = np.random.default_rng(0)
X = random.normal(size=(24, 3)).astype(np.float32)
Y = X @ np.ones((3, 1), np.float32)
MODULE = nn.Dense(1)


def make_loop(batch_size=8, data=None, module=MODULE, **options):
    data = ff.ArrayStream(X, Y, batch_size=batch_size, shuffle=True) if data is None else data
    task = ff.TrainTask(module.apply, optax.adam(0.01), "mse", data, ["mae"])
    options = {"n_steps_per_checkpoint": 12, "stdout": False, **options}
    return ff.TrainLoop(module.init, task, 0, devices=jax.devices()[:1], **options)


@pytest.fixture
def seconds(monkeypatch):
    """What a dispatch takes, by its number of steps: the clock of the trial runs by it alone."""
    dispatch = {1: 0.001}
    clock = itertools.count()
    now = [0.0]
    advance = Stepper.advance

    def timed(self, n):
        before, prepared = self.step, self.preparation_time
        has_stepped = advance(self, n)
        now[0] += dispatch.get(self.step - before, 0.0)
        now[0] += self.preparation_time - prepared
        return has_stepped

    monkeypatch.setattr(Stepper, "advance", timed)
    monkeypatch.setattr(_trial.time, "perf_counter", lambda: now[0] + 1e-9 * next(clock))
    return dispatch


def dispatches(loop):
    """The steps after each of which the loop was told that a dispatch is done."""
    steps = [0]
    loop.watchers.append(steps.append)
    return steps


def leaves_of(checkpoints):
    return [jax.tree.leaves((c.state.params, c.state.opt_state)) for c in checkpoints]


@pytest.mark.parametrize(("fused", "chosen"), [(0.006, 12), (0.0115, 1), (0.5, 1)])
def test_the_faster_number_of_steps_per_dispatch_is_kept(seconds, fused, chosen):
    seconds[12] = fused
    loop = make_loop(n_steps=97, steps_per_call="auto")
    list(loop)
    assert loop.steps_per_call == chosen


def test_steps_are_tried_in_spans_and_then_dispatched_as_chosen(seconds):
    seconds[12] = 0.006
    loop = make_loop(n_steps=97, steps_per_call="auto")
    steps = dispatches(loop)
    list(loop)
    sizes = np.diff(steps).tolist()
    # Three spans of eight single steps, the first of them cut short by the checkpoint of step 1.
    assert sizes == [1] * 37 + [12] * 5


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA's loops on a CPU")
def test_of_convolutions_on_a_cpu_several_steps_are_not_tried(seconds):
    module = nn.Sequential([nn.Conv(2, (3, 3)), lambda x: x.mean((1, 2))])
    images, targets = np.ones((24, 4, 4, 1), np.float32), np.zeros((24, 2), np.float32)
    loop = make_loop(data=ff.ArrayStream(images, targets, batch_size=8), module=module, n_steps=97)
    loop.steps_per_call = "auto"
    steps = dispatches(loop)
    list(loop)
    assert max(np.diff(steps)) == loop.steps_per_call == 1


def test_what_is_far_slower_together_is_tried_once(seconds):
    seconds[12] = 0.1
    loop = make_loop(n_steps=97, steps_per_call="auto")
    steps = dispatches(loop)
    list(loop)
    assert np.diff(steps).tolist().count(12) == 1


def test_a_trial_changes_nothing_in_the_results(seconds):
    seconds[12] = 0.006
    one = list(make_loop(n_steps=90))
    tried = list(make_loop(n_steps=90, steps_per_call="auto"))
    assert [c.step for c in tried] == [c.step for c in one]
    assert [c.data_state for c in tried] == [c.data_state for c in one]
    assert [c.n_examples for c in tried] == [c.n_examples for c in one]
    # Some versions of XLA round the last bits in a loop otherwise than without it.
    for a, b in zip(one, tried, strict=True):
        assert a.metrics == pytest.approx(b.metrics, rel=1e-6)
    for a, b in zip(leaves_of(one), leaves_of(tried), strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-7), a, b)


def test_steps_that_no_checkpoint_may_part_are_not_tried():
    loop = make_loop(n_steps=40, n_steps_per_checkpoint=1, steps_per_call="auto")
    steps = dispatches(loop)
    list(loop)
    assert steps == list(range(41))


def test_data_that_ends_within_the_trial_ends_the_loop():
    data = [(X[:8], Y[:8])] * 20
    loop = make_loop(data=data, steps_per_call="auto")
    assert [c.step for c in loop] == [1, 13, 20]


def test_batches_that_share_no_program_are_stepped_one_by_one(seconds):
    batches = [(X[:n], Y[:n]) for n in (8, 4)] * 49
    task = ff.TrainTask(MODULE.apply, optax.sgd(0.1), "mse", batches, pad=False)
    loop = ff.TrainLoop(
        MODULE.init,
        task,
        0,
        n_steps_per_checkpoint=12,
        devices=jax.devices()[:1],
        steps_per_call="auto",
        stdout=False,
    )
    *_, last = loop
    assert last.step == 98 and loop.steps_per_call == 1


def test_the_choice_is_told_once(seconds, capsys):
    seconds[12] = 0.006
    list(make_loop(n_steps=97, steps_per_call="auto", stdout=True))
    told = [line for line in capsys.readouterr().err.splitlines() if "steps_per_call" in line]
    assert told == [
        "flaxfit  steps_per_call='auto': a step takes 1,000 us by itself and 500 us as one of 12 "
        "in a dispatch; chosen 12"
    ]


def test_auto_again_keeps_the_choice_until_batches_have_another_shape(seconds):
    seconds[12] = 0.006
    loop = make_loop(n_steps=97, steps_per_call="auto")
    list(loop)
    loop.steps_per_call = "auto"
    assert loop.steps_per_call == 12
    loop.data = ff.ArrayStream(X, Y, batch_size=4)
    next(loop.run(1))
    next(loop.run(1))
    assert loop.steps_per_call == 1


def test_a_number_ends_the_trial():
    loop = make_loop(steps_per_call="auto")
    loop.steps_per_call = 3
    assert loop.steps_per_call == 3


def test_fit_finds_out_over_its_epochs(seconds):
    seconds[3] = 0.001
    model = ff.Model(MODULE, optax.adam(0.01), "mse", strategy=ff.DataParallel(jax.devices()[:1]))
    model.fit(X, Y, batch_size=8, epochs=12, steps_per_execution="auto", verbose=0)
    assert model._loop.steps_per_call == 3
    model.fit(X, Y, batch_size=8, steps_per_execution="auto", verbose=0)
    assert model._loop.steps_per_call == 3


def test_no_more_steps_are_tried_than_a_tenth_of_a_second_holds():
    assert [several(t, 10_000) for t in (1e-6, 1e-3, 0.02, 0.06)] == [25, 25, 5, 1]
    assert [several(1e-6, n) for n in (2, 28, 37, 64)] == [2, 28, 32, 32]


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA's loops on a CPU")
def test_convolutions_in_a_loop_of_the_cpu_are_noticed():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(16, (3, 3))(x))
            x = nn.relu(nn.Conv(32, (3, 3))(x))
            return nn.Dense(10)(x.mean((1, 2)))

    module = Network()
    images = random.normal(size=(64, 28, 28, 1)).astype(np.float32)
    stream = ff.ArrayStream(images, np.zeros(64, np.int32), batch_size=32)
    task = ff.TrainTask(module.apply, optax.sgd(0.1), "crossentropy", stream)
    loop = ff.TrainLoop(
        module.init,
        task,
        0,
        n_steps_per_checkpoint=100,
        n_steps=201,
        devices=jax.devices()[:1],
        steps_per_call="auto",
        stdout=False,
    )
    list(loop)
    assert loop.steps_per_call == 1


def test_of_several_processes_the_slowest_counts(seconds, monkeypatch):
    seconds[12] = 0.006
    monkeypatch.setattr(Consistency, "slowest", lambda self, own: max(own, 0.001))
    loop = make_loop(n_steps=97, steps_per_call="auto")
    list(loop)
    assert loop.steps_per_call == 1
