"""Rollback: a diverged run continues from its last good state, with later data."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from loops import assert_equal, init_of
from marks import thorough

import flaxfit as ff
from flaxfit.callbacks import Rollback
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter

ONE = np.ones((4, 1), np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=False)(x))


def batches(bad):
    """Batches of which some hold a value that is not finite."""
    rng = np.random.default_rng(0)
    for i in range(1, 13):
        x = rng.normal(size=(4, 3)).astype(np.float32)
        yield (x * np.nan if i in bad else x), x.sum(1, keepdims=True)


def make_loop(bad, callbacks, *, init=None, **options):
    task = ff.TrainTask(Net().apply, optax.adam(1e-2), "mse", batches(bad))
    options = {"n_steps_per_checkpoint": 2, "first_checkpoint": 2, "stdout": False, **options}
    return ff.TrainLoop(init or init_of(Net(), 3), task, 0, callbacks=callbacks, **options)


@pytest.mark.slow
def test_the_run_goes_on_from_the_last_good_state():
    rollback = Rollback()
    loop = make_loop({5, 9}, [rollback])
    found = {checkpoint.step: checkpoint for checkpoint in loop}
    assert [c.metrics["rollbacks"] for c in found.values()] == [0, 0, 1, 1, 2, 2]
    assert np.isnan(found[6].loss) and np.isfinite(found[8].loss)
    # Batches 5 and 6 are skipped, with all that the model has kept of them.
    for after, before in ((6, 4), (10, 8)):
        for field in ("params", "opt_state", "model_state"):
            assert_equal(getattr(found[after].state, field), getattr(found[before].state, field))
        assert int(found[after].state.step) == after
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(loop.state.params))


def definition(rate):
    return ff.optim.OptimizerDef(optax.sgd, learning_rate=rate)


OPTIMIZERS = {
    "constant": definition(0.5),
    "schedule": definition(optax.constant_schedule(0.5)),
    "groups": ff.optim.MultiOptimizer((".*", definition(0.5))),
}


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", [thorough("constant"), thorough("schedule"), "groups"])
def test_a_rate_that_was_set_stays_when_the_state_goes_back(kind, is_first):
    """Also one that was set at the very checkpoint that is gone back to."""

    def lower(checkpoint):
        if checkpoint.step == 2:
            loop.set_hyperparams(learning_rate=0.25)

    data = [(ONE, ONE), (ONE, ONE), (ONE * np.inf, ONE), (ONE, ONE)]
    task = ff.TrainTask(nn.Dense(1).apply, OPTIMIZERS[kind], "mse", data)
    callbacks = [lower, Rollback()][:: 1 if is_first else -1]
    loop = ff.TrainLoop(init_of(nn.Dense(1), 1), task, 0, callbacks=callbacks, stdout=False)
    found = [checkpoint.metrics for checkpoint in loop]
    assert [each["rollbacks"] for each in found] == [0, 0, 1, 1]
    name = "learning_rate/.*" if kind == "groups" else "learning_rate"
    assert [each[name] for each in found] == [0.5, 0.5, 0.25, 0.25]


def test_the_start_is_good():
    loop = make_loop({2}, [Rollback()])
    start = loop.state
    first = next(loop)
    assert first.metrics["rollbacks"] == 1
    assert_equal(first.state.params, start.params)
    assert np.isfinite(next(loop).loss)


def test_parameters_that_are_not_finite_are_not_good():
    def loss(outputs, targets):
        # Its value is finite, its gradient is not.
        return (0 * outputs[:, 0]) ** 0.5

    task = ff.TrainTask(nn.Dense(1).apply, optax.sgd(1.0), loss, (ONE, ONE))
    options = {"n_steps": 1, "callbacks": [Rollback()], "stdout": False}
    (checkpoint,) = ff.TrainLoop(init_of(nn.Dense(1), 1), task, 0, **options)
    assert np.isfinite(checkpoint.loss) and checkpoint.metrics["rollbacks"] == 1


def test_it_gives_up_after_some_times():
    loop = make_loop(set(range(3, 13)), [Rollback(n_times=2)])
    with pytest.raises(FloatingPointError, match="loss is nan at step 8, after 2 rollbacks"):
        list(loop)
    with pytest.raises(ValueError, match="at least 1"):
        Rollback(n_times=0)


def test_each_event_is_in_the_history_of_fit():
    x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    model = ff.Model(nn.Dense(1), optax.sgd(0.1), "mse")

    def steps():
        for i in range(12):
            yield (np.full_like(x, np.inf) if i == 5 else x), x.sum(1, keepdims=True)

    history = model.fit(steps, steps_per_epoch=4, epochs=3, callbacks=[Rollback()], verbose=0)
    assert history["rollbacks"] == [0, 1, 1]
    assert [np.isfinite(loss) for loss in history["loss"]] == [True, False, True]


@pytest.mark.slow
def test_what_was_put_back_is_what_is_saved(tmp_path):
    list(make_loop({5}, [Rollback(), CheckpointFileWriter(tmp_path)], n_steps=6))
    found = CheckpointFileReader(tmp_path).read()
    assert found.metrics["rollbacks"] == 1 and found.step == 6
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.state.params))


def test_the_count_survives_a_restart():
    rollback, again = Rollback(), Rollback()
    next(make_loop({2}, [rollback]))
    again.set_state(rollback.get_state())
    assert again.n_rollbacks == 1
