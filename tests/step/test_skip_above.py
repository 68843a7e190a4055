"""Steps that are left out because their loss or gradient stands out, in training."""

import functools

import jax
import numpy as np
import optax
import pytest
from loops import assert_close, assert_equal
from marks import slow, thorough
from strategies import strategies

import flaxfit as ff
from flaxfit.optim._spikes import ENOUGH

N = min(len(jax.devices()), 8)
BATCH = 8
N_STEPS = ENOUGH + 6
SPIKE = ENOUGH + 2
rng = np.random.default_rng(0)
X = rng.normal(size=(N_STEPS, BATCH, 3)).astype(np.float32)
Y = (X.sum(-1) + rng.normal(size=(N_STEPS, BATCH))).astype(np.float32)
PARAMS = {"w": np.ones(3, np.float32)}
STRATEGIES = strategies(N)


def apply(variables, x, **_):
    return x @ variables["params"]["w"]


def batches(spike=SPIKE, value=1e3):
    """Batches, of which one holds a target that is far off."""
    targets = Y.copy()
    if spike is not None:
        targets[spike, 0] = value
    return [(x, y) for x, y in zip(X, targets, strict=True)]


def init(key, x):
    return {"params": PARAMS}


def loop_of(data, strategy="one device", start=init, *, every=1, task_options=None, **options):
    options = {"n_steps_per_checkpoint": every, "first_checkpoint": every, **options}
    task_options = {"skip_above": 6.0, **(task_options or {})}
    task = ff.TrainTask(apply, optax.adam(0.01), "mse", data, **task_options)
    strategy = STRATEGIES[strategy]()
    return ff.TrainLoop(start, task, 0, strategy=strategy, stdout=False, **options)


def inner(state):
    """All but the ring."""
    return state.params, state.opt_state.inner


def skips(checkpoints):
    return [checkpoint.metrics["skipped_steps"] for checkpoint in checkpoints]


@functools.cache
def expected():
    """The last state of a run that never sees the spike, and its losses."""
    data = batches()
    del data[SPIKE]
    checkpoints = list(loop_of(data, task_options={"skip_above": None}))
    return checkpoints[-1].state, [checkpoint.loss for checkpoint in checkpoints]


@pytest.mark.parametrize("accumulate", [1, thorough(2)])
@pytest.mark.parametrize(
    "strategy",
    ["data-parallel", slow("FSDP"), thorough("virtual replicas"), thorough("one device")],
)
def test_a_spike_leaves_all_but_the_step_and_the_ring(strategy, accumulate):
    loop = loop_of(batches(), strategy, task_options={"accumulate": accumulate})
    checkpoints = list(loop)
    assert skips(checkpoints) == [float(step == SPIKE) for step in range(N_STEPS)]
    assert_equal(*(inner(checkpoints[step].state) for step in (SPIKE - 1, SPIKE)))
    assert int(loop.state.step) == int(loop.state.opt_state.recent.n_steps) == N_STEPS
    state, losses = expected()
    assert_close(inner(loop.state), (state.params, state.opt_state), rtol=1e-4, atol=1e-5)
    found = [checkpoint.loss for step, checkpoint in enumerate(checkpoints) if step != SPIKE]
    np.testing.assert_allclose(found, losses, rtol=1e-4)


@pytest.mark.slow
def test_several_steps_in_a_call_skip_the_same_step():
    loop = loop_of(batches(), every=N_STEPS, steps_per_call=N_STEPS // 2)
    (checkpoint,) = loop
    assert checkpoint.metrics["skipped_steps"] == 1
    single = loop_of(batches())
    list(single)
    both = [(each.state.params, each.state.opt_state) for each in (loop, single)]
    assert_close(*both, rtol=1e-6)
    assert checkpoint.loss == pytest.approx(np.mean(expected()[1]), rel=1e-6)


@pytest.mark.slow
def test_a_run_that_resumes_before_the_spike_skips_it(tmp_path):
    with ff.checkpoints.CheckpointFileWriter(tmp_path) as writer:
        list(loop_of(batches(), every=SPIKE, callbacks=[writer]).run_until(SPIKE))
    reader = ff.checkpoints.CheckpointFileReader(tmp_path, init)
    resumed = loop_of(batches(), start=reader)
    assert resumed.step == SPIKE
    assert next(resumed).metrics["skipped_steps"] == 1
    straight = loop_of(batches())
    list(straight)
    list(resumed)
    both = [(each.state.params, each.state.opt_state) for each in (resumed, straight)]
    assert_equal(*both)


@pytest.mark.slow
def test_steps_that_are_not_finite_are_skipped_too_and_leave_the_ring_alone():
    loop = loop_of(batches(spike=1, value=np.inf))
    assert skips(loop) == [float(step == 1) for step in range(N_STEPS)]
    assert int(loop.state.opt_state.recent.n_steps) == N_STEPS - 1
    assert np.all(np.isfinite(loop.state.opt_state.recent.values))


def test_empty_batches_leave_the_ring_alone():
    empty = [(X[0], Y[0], np.zeros(BATCH, np.float32))]
    loop = loop_of(empty + [(x, y, np.ones(BATCH, np.float32)) for x, y in batches(None)[:3]])
    list(loop)
    assert int(loop.state.step) == 4 and int(loop.state.opt_state.recent.n_steps) == 3


@pytest.mark.slow
def test_a_gradient_that_stands_out_is_a_spike_though_the_loss_is_not():
    def steep(outputs, targets):
        """A thousand times as steep where the target is 1, at the same value."""
        values = (outputs - jax.lax.stop_gradient(outputs)) * (1 + 999 * targets)
        return values + jax.lax.stop_gradient(abs(outputs))

    data = [(x, np.zeros(BATCH, np.float32)) for x in X]
    # Only in the last row, which the first device does not see.
    data[SPIKE] = (X[SPIKE], (np.arange(BATCH) == BATCH - 1).astype(np.float32))
    task = ff.TrainTask(apply, optax.sgd(1e-6), steep, data, skip_above=6.0)
    loop = ff.TrainLoop(init, task, 0, n_steps_per_checkpoint=1, stdout=False)
    assert skips(loop) == [float(step == SPIKE) for step in range(N_STEPS)]


@pytest.mark.parametrize("wrong", [0, -1.0, True, "6"])
def test_a_threshold_is_a_positive_number(wrong):
    with pytest.raises(ValueError, match="skip_above must be a number of standard deviations"):
        ff.TrainTask(apply, optax.sgd(0.1), "mse", skip_above=wrong)


@pytest.mark.parametrize("options", [{"skip_above": 6.0}, {"skip_nonfinite": True}], ids=str)
def test_steps_are_judged_where_types_are_not_promoted(options):
    with jax.numpy_dtype_promotion("strict"):
        task = ff.TrainTask(apply, optax.sgd(0.01), "mse", batches(), **options)
        assert skips(ff.TrainLoop(init, task, 0, n_steps=2, stdout=False)) == [0, 0]
