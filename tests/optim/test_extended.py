"""The options of a task around its optimizer: the moving average that overwrites the parameters."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from loops import init_of
from marks import thorough

import flaxfit as ff
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter
from flaxfit.optim import swap_ema

X = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
NET = nn.Sequential((nn.Dense(4), nn.Dense(1)))
INIT = init_of(NET, 3)


def loop_of(init=INIT, n_steps=4, callbacks=(), devices=1, **options):
    task = ff.TrainTask(
        NET.apply, optax.adam(0.1), "mse", (X, X[:, :1]), ema=0.9, freeze="layers_1/bias", **options
    )
    strategy = {"strategy": devices} if isinstance(devices, ff.Sharded) else {}
    return ff.TrainLoop(
        init,
        task,
        0,
        n_steps=n_steps,
        callbacks=list(callbacks),
        stdout=False,
        **(strategy or {"devices": jax.devices()[:devices]}),
    )


def assert_close(a, b, rtol=1e-4):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, 1e-6), a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "options"),
    [thorough(1, {}), (4, {}), thorough(ff.Sharded(), {}), (1, {"accumulate": 4})],
)
def test_the_parameters_are_their_average_after_every_second_step(devices, options):
    frequent = {"ema_overwrite_frequency": 2, **options}
    states = [checkpoint.state for checkpoint in loop_of(devices=devices, **frequent)]
    for step, state in enumerate(states, start=1):
        kernel, average = (
            np.asarray(each.params["layers_0"]["kernel"]) for each in (state, swap_ema(state))
        )
        assert np.allclose(kernel, average, rtol=1e-5, atol=1e-7) == (step % 2 == 0)
    expected = [checkpoint.state.params for checkpoint in loop_of(**frequent)]
    assert_close(states[-1].params, expected[-1])


@pytest.mark.slow
def test_a_resumed_run_overwrites_at_the_same_steps(tmp_path):
    frequent = {"ema_overwrite_frequency": 2}
    with CheckpointFileWriter(tmp_path) as writer:
        list(loop_of(n_steps=1, callbacks=[writer], **frequent))
    whole, resumed = (
        loop_of(**frequent),
        loop_of(CheckpointFileReader(tmp_path, INIT), **frequent),
    )
    for loop in (whole, resumed):
        list(loop)
    jax.tree.map(np.testing.assert_array_equal, whole.state.params, resumed.state.params)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ema_overwrite_frequency": 2}, "needs the moving average"),
        ({"ema_overwrite_frequency": 0, "ema": 0.9}, "ema_overwrite_frequency"),
        ({"ema_overwrite_frequency": 2.5, "ema": 0.9}, "ema_overwrite_frequency"),
    ],
)
def test_a_frequency_without_an_average_or_that_is_none_is_refused(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        ff.TrainTask(NET.apply, optax.sgd(0.1), "mse", (X, X), **options)
