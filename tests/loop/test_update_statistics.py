"""update_statistics: the batch statistics of given parameters, from one pass over data."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from marks import thorough

import flaxfit as ff
from flaxfit.callbacks import AverageWeights

X = (30 * np.random.default_rng(0).normal(size=(48, 3)) + 20).astype(np.float32)
Y = X[:, :1] / 30
ONE = ff.DataParallel(jax.devices()[:1])


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train, name="norm")(nn.Dense(4, name="first")(x))
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(x))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.last = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(self.first(x)))


def expected(params):
    """The statistics of all rows, by NumPy."""
    outputs = X @ np.float64(params["kernel"]) + params["bias"]
    return {"mean": outputs.mean(0), "var": outputs.var(0)}


def check(state):
    found = jax.device_get(state.model_state["batch_stats"]["norm"])
    for name, each in expected(jax.device_get(state.params["first"])).items():
        np.testing.assert_allclose(found[name], each, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "strategy", "ema"),
    [
        (Linen(), ff.DataParallel, 0.9),
        thorough(Nnx, lambda: ONE, None),
        thorough(Nnx, ff.Sharded.fsdp, 0.9),
        thorough(Linen(), lambda: ff.DataParallel(virtual_replicas=4), None),
    ],
)
def test_the_statistics_are_those_of_all_rows(module, strategy, ema):
    strategy, data = strategy(), ff.ArrayStream(X, Y, batch_size=20)  # The last one has 8.
    task = ff.TrainTask(module, optax.adam(0.1), "mse", data, ema=ema)
    loop = ff.TrainLoop(module, task, 0, n_steps=4, strategy=strategy, stdout=False)
    list(loop)
    before, options = loop.state, {"strategy": strategy}
    state = ff.update_statistics(task, before, **options)
    check(ff.optim.averaged(state) if ema else state)
    if ema:  # Those of the last parameters stay.
        jax.tree.map(np.testing.assert_array_equal, state.model_state, before.model_state)
    without_targets = ff.update_statistics(task, before, [X[:20], X[20:40], X[40:]], **options)
    jax.tree.map(np.testing.assert_array_equal, *map(values, (without_targets, state)))
    loop.restore(state)
    loop.next_step()


def values(state):
    return state.replace(key=0)


@pytest.mark.slow
def test_a_model_recomputes_them_for_the_mean_of_its_weights():
    model = ff.Model(Linen(), optax.adam(0.1), "mse", strategy=ONE)
    options = {"batch_size": 16, "callbacks": [AverageWeights()], "verbose": 0}
    model.fit(X, Y, epochs=3, **options)
    model.update_statistics(X, batch_size=48)
    state = model.state
    kernel, bias = (np.float64(state.params["first"][name]) for name in ("kernel", "bias"))
    found = state.model_state["batch_stats"]["norm"]
    np.testing.assert_allclose(found["var"], (X @ kernel + bias).var(0), rtol=1e-4)


@pytest.mark.slow
def test_statistics_in_16_bits_keep_their_dtype():
    class Half(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            mean = self.variable("batch_stats", "mean", jnp.zeros, 3, jnp.bfloat16)
            if train:
                mean.value = (0.9 * mean.value + 0.1 * x.mean(0)).astype(jnp.bfloat16)
            return nn.Dense(1)(x - mean.value)

    model = ff.Model(Half(), optax.sgd(0.1), "mse", strategy=ONE)
    model.update_statistics(X, batch_size=20)
    mean = model.state.model_state["batch_stats"]["mean"]
    assert mean.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(mean), X.mean(0), rtol=0.05)


def test_a_model_without_statistics_is_refused():
    task = ff.TrainTask(nn.Dense(1), optax.sgd(0.1), "mse", (X, Y))
    state = ff.TrainState.create(task.optimizer, {"params": {}})
    with pytest.raises(ValueError, match="no collection 'batch_stats'"):
        ff.update_statistics(task, state)


def test_data_that_repeats_forever_is_refused():
    task = ff.TrainTask(Linen(), optax.sgd(0.1), "mse", ff.ArrayStream(X, Y, epochs=None))
    state = ff.TrainState.create(task.optimizer, {"params": {}, "batch_stats": {}})

    class Endless(list):
        def __len__(self):
            return 2**62

    with pytest.raises(ValueError, match="repeats forever. Pass n_steps"):
        ff.update_statistics(task, state, Endless([(X, Y)]))


def test_renamed_columns_are_taken_once():
    options = {"inputs": {"x": "y"}, "targets": "x", "strategy": ONE}
    model = ff.Model(nn.BatchNorm(), optax.sgd(0.1), "mse", **options)
    model.update_statistics({"x": X, "y": X + 1}, batch_size=len(X))
    mean = model.state.model_state["batch_stats"]["mean"]
    np.testing.assert_allclose(mean, X.mean(0) + 1, rtol=1e-5)
