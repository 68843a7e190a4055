"""The options of a task around its optimizer: the moving average that overwrites the parameters."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loops import init_of
from marks import thorough

import flaxfit as ff
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter
from flaxfit.optim import averaged, swap_ema
from flaxfit.optim._averaged import with_average_of

X = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
NET = nn.Sequential((nn.Dense(4), nn.Dense(1)))
INIT = init_of(NET, 3)
ONE = ff.DataParallel(jax.devices()[:1])
FREQUENT = {"freeze": "layers_1/bias", "ema_overwrite_frequency": 2}


def loop_of(init=INIT, module=NET, n_steps=4, callbacks=(), strategy=ONE, **options):
    options = {"ema": 0.9, **options}
    task = ff.TrainTask(module, optax.adam(0.1), "mse", (X, X[:, :1]), **options)
    options = {"n_steps": n_steps, "callbacks": list(callbacks), "strategy": strategy}
    return ff.TrainLoop(init, task, 0, stdout=False, **options)


def assert_close(a, b, rtol=1e-4):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, 1e-6), a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        thorough(ONE, {}),
        (ff.DataParallel(jax.devices()[:4]), {}),
        thorough(ff.Sharded(), {}),
        (ONE, {"accumulate": 4}),
    ],
)
def test_the_parameters_are_their_average_after_every_second_step(strategy, options):
    frequent = {**FREQUENT, **options}
    states = [checkpoint.state for checkpoint in loop_of(strategy=strategy, **frequent)]
    for step, state in enumerate(states, start=1):
        kernel, average = (
            np.asarray(each.params["layers_0"]["kernel"]) for each in (state, swap_ema(state))
        )
        assert np.allclose(kernel, average, rtol=1e-5, atol=1e-7) == (step % 2 == 0)
    expected = [checkpoint.state.params for checkpoint in loop_of(**frequent)]
    assert_close(states[-1].params, expected[-1])


@pytest.mark.slow
def test_a_resumed_run_overwrites_at_the_same_steps(tmp_path):
    with CheckpointFileWriter(tmp_path) as writer:
        list(loop_of(n_steps=1, callbacks=[writer], **FREQUENT))
    whole, resumed = (
        loop_of(init, **FREQUENT) for init in (INIT, CheckpointFileReader(tmp_path, INIT))
    )
    for loop in (whole, resumed):
        list(loop)
    jax.tree.map(np.testing.assert_array_equal, whole.state.params, resumed.state.params)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_average_of_parameters_in_16_bits_is_kept_in_float32(dtype):
    optimizer = ff.TrainTask(NET.apply, optax.sgd(2**-5), "mse", (X, X), ema=0.999).optimizer
    w = jnp.ones(2, dtype)
    state = ff.TrainState.create(optimizer, {"params": {"w": w}})
    step, expected = jax.jit(lambda state: state.apply_gradient(optimizer, {"w": w})), np.ones(2)
    for _ in range(40):
        state = step(state)
        expected = 0.999 * expected + 0.001 * np.asarray(state.params["w"], "f8")
    np.testing.assert_allclose(state.opt_state.average["w"], expected, rtol=1e-6)
    swapped = swap_ema(state)
    np.testing.assert_array_equal(swapped.params["w"], expected.astype(dtype))
    again = swap_ema(swapped)
    assert again.params["w"].dtype == swapped.params["w"].dtype == dtype
    np.testing.assert_array_equal(again.params["w"], state.params["w"])


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(4)(x))
        is_trained = self.variable("counts", "is_trained", lambda: jnp.zeros(()))
        if train:
            is_trained.value = jnp.ones(())
        return nn.Dense(1)(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (lambda: ONE, {"accumulate": 2}),
        (ff.DataParallel, {}),
        thorough(ff.Sharded.fsdp, {}),
        thorough(lambda: ONE, {"freeze": "Dense_0/.*", "skip_nonfinite": True}),
    ],
)
def test_batch_statistics_are_averaged_and_evaluated_with_the_average(strategy, options):
    loop = loop_of(Normalized(), Normalized(), 6, strategy=strategy(), ema=0.8, **options)
    states = [jax.device_get(checkpoint.state) for checkpoint in loop]
    expected = {"mean": np.zeros(4), "var": np.ones(4)}
    for state in states:
        own = state.model_state["batch_stats"]["BatchNorm_0"]
        expected = {n: 0.8 * old + 0.2 * own[n] for n, old in expected.items()}
    found = averaged(states[-1])
    assert_close(found.model_state["batch_stats"]["BatchNorm_0"], expected, 1e-5)
    assert found.model_state["counts"] == states[-1].model_state["counts"]
    task = ff.EvalTask(Normalized(), [], (X, X[:, :1]), loss="mse")
    outputs = np.asarray(Normalized().apply(found.variables, X, mutable=False))
    measured = ff.EvalLoop(task, ema=True).measure(loop.state)["loss"]
    assert measured == pytest.approx(np.mean((outputs - X[:, :1]) ** 2), 1e-4)
    jax.tree.map(np.testing.assert_array_equal, *map(values, (swap_ema(found), states[-1])))
    stopped = with_average_of(states[-1], vars(states[1]))
    jax.tree.map(
        np.testing.assert_array_equal, stopped.opt_state.statistics, states[1].opt_state.statistics
    )


def values(state):
    return state.params, state.model_state, state.opt_state.average, state.opt_state.statistics


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
