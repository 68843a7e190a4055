"""AverageWeights: the mean of the weights of checkpoints is in place when training has ended."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loops import assert_equal, init_of
from marks import thorough

import flaxfit as ff
from flaxfit import Checkpoint
from flaxfit.callbacks import AverageWeights, EarlyStopping
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter

x = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(2)(x))
        self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32)).value += train
        return nn.Dense(1, param_dtype=jnp.bfloat16)(x)


def make_loop(callbacks, n_steps=5, init=None, **options):
    task = ff.TrainTask(Net().apply, optax.sgd(0.1), "mse", (x, 3 * x), **options)
    init = init or init_of(Net(), 1)
    return ff.TrainLoop(init, task, 0, n_steps=n_steps, callbacks=callbacks, stdout=False)


def weights_of(state):
    return jax.device_get({"params": state.params, "model_state": state.model_state})


def assert_mean(state, states):
    """Compares weights with NumPy's means in float64; those in bfloat16 up to its rounding."""

    def check(x, *each):
        mean = each[-1] if x.dtype == np.int32 else np.mean(np.asarray(each, np.float64), 0)
        rounding = 2**-8 if x.dtype == jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(np.asarray(x, np.float64), mean, rounding, 1e-7)

    jax.tree.map(check, weights_of(state), *map(weights_of, states))


@pytest.mark.slow
@pytest.mark.parametrize("start", [2, thorough(0)])
def test_the_loop_ends_with_the_mean_of_what_it_yielded_and_not_before(start):
    loop = make_loop([AverageWeights(start)])
    states = [checkpoint.state for checkpoint in loop]
    assert_mean(loop.state, states[start:])
    expected = [checkpoint.state for checkpoint in make_loop([])]
    assert_equal(weights_of(states[-1]), weights_of(expected[-1]))
    averaged = weights_of(loop.state)
    loop.close()
    assert_equal(weights_of(loop.state), averaged)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_mean(tmp_path):
    whole = make_loop([AverageWeights(1)])
    list(whole)
    with CheckpointFileWriter(tmp_path) as writer:
        list(make_loop([AverageWeights(1), writer], n_steps=3))
    resumed = make_loop([AverageWeights(1)], init=CheckpointFileReader(tmp_path, init_of(Net(), 1)))
    list(resumed)
    assert_equal(weights_of(whole.state), weights_of(resumed.state))


def test_small_steps_in_bfloat16_are_not_lost():
    values = np.float32([1.0, *[1 + 2**-7] * 300])
    average = AverageWeights()
    for step, value in enumerate(values):
        state = ff.TrainState(step, {"w": jnp.full(1, value, jnp.bfloat16)}, (), {}, None)
        average(Checkpoint(step=step, state=state, metrics={}))
    mean = average.get_state()["params"]["w"]
    np.testing.assert_allclose(mean, values.mean(keepdims=True), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [thorough(None), ff.Sharded()])
def test_a_model_ends_with_the_mean_of_its_epochs(strategy):
    model = ff.Model(Net(), optax.sgd(0.1), "mse", strategy=strategy)
    for epochs, start in (4, 1), (1, 0):
        states = []
        keep = [lambda checkpoint, to=states: to.append(checkpoint.state), AverageWeights(start)]
        model.fit(x, 3 * x, batch_size=8, epochs=epochs, callbacks=keep, verbose=0)
        assert_mean(model.state, states[start:])


@pytest.mark.slow
def test_a_run_that_ends_too_early_has_no_average(capsys):
    loop = make_loop([AverageWeights(9)], n_steps=1)
    states = [checkpoint.state for checkpoint in loop]
    assert_equal(weights_of(states[-1]), weights_of(loop.state))
    assert "training ended before epoch 10: no average" in capsys.readouterr().err


@pytest.mark.slow
def test_what_averages_or_sets_the_weights_itself_is_refused():
    with pytest.raises(ValueError, match="already have an average"):
        make_loop([AverageWeights()], ema=0.9)
    with pytest.raises(ValueError, match="both set the weights"):
        make_loop([EarlyStopping("loss"), AverageWeights()])
    make_loop([EarlyStopping("loss", restore_best=False), AverageWeights()])
    with pytest.raises(ValueError, match="must not be negative"):
        AverageWeights(-1)
