"""A model is traced once, whatever it is traced for, and anew where that would differ."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import flaxfit as ff

X = np.ones((8, 3), np.float32)
DATA = [(X, X[:, :1])] * 4


def counted_module():
    calls = []

    class Counted(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            calls.append("init" if self.is_initializing() else "train" if train else "apply")
            return nn.Dense(1)(nn.Dropout(0.1, deterministic=not train)(x))

    return Counted(), calls


def counted(**options):
    """A model, and what it is traced for."""
    module, calls = counted_module()
    return ff.Model(module, optax.sgd(0.1), "mse", metrics=["mae"], **options), calls


@pytest.mark.parametrize("n", [48, 44])  # Of these the last batch is padded.
def test_a_model_is_traced_once_for_all_programs(n):
    model, calls = counted(strategy=ff.DataParallel(jax.devices()[:1]))
    x, y = np.ones((n, 3), np.float32), np.ones((n, 1), np.float32)
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert calls == ["init", "train"]
    model.fit(x, y, batch_size=16, epochs=2, steps_per_execution=2, shuffle=False, verbose=0)
    assert calls == ["init", "train"]
    model.evaluate(x, y, batch_size=16)
    assert calls == ["init", "train", "apply"]
    model.predict(x, batch_size=16)
    assert calls == ["init", "train", "apply", "apply"]


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: ff.DataParallel(jax.devices()[:2]),
        lambda: ff.Sharded({"data": 2}, devices=jax.devices()[:2]),
    ],
)
def test_on_several_devices_a_model_is_traced_to_be_looked_at_and_for_each_program(strategy):
    model, calls = counted(strategy=strategy())
    x, y = np.ones((48, 3), np.float32), np.ones((48, 1), np.float32)
    model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    assert calls == ["init", "train", "train"]
    model.evaluate(x, y, batch_size=16)
    assert calls[3:] == ["apply", "apply"]


def test_parameters_that_are_frozen_have_the_model_be_traced_anew():
    module, calls = counted_module()
    task = ff.TrainTask(module.apply, optax.sgd(0.1), "mse", DATA)
    loop = ff.TrainLoop(module.init, task, 0, devices=jax.devices()[:1], stdout=False)
    loop.next_step()
    assert calls == ["init", "apply"]
    before = loop.next_step().state.params["Dense_0"]
    loop.freeze = ".*kernel"
    after = loop.next_step().state.params["Dense_0"]
    assert calls == ["init", "apply", "apply"]
    np.testing.assert_array_equal(before["kernel"], after["kernel"])
    assert not np.array_equal(before["bias"], after["bias"])


def test_settings_of_jax_that_a_trace_depends_on_have_it_be_traced_anew():
    model, calls = counted(strategy=ff.DataParallel(jax.devices()[:1]))
    model.fit(X, X[:, :1], batch_size=4, epochs=2, verbose=0)
    assert calls == ["init", "train"]
    with jax.default_matmul_precision("highest"):
        model.fit(X, X[:, :1], batch_size=4, steps_per_execution=2, verbose=0)
    assert calls == ["init", "train", "train"]


def test_a_loss_that_is_a_scalar_is_traced_again_without_the_weights_it_cannot_take():
    module, calls = counted_module()
    task = ff.TrainTask(module.apply, optax.sgd(0.1), lambda o, t: jnp.mean((o - t) ** 2), DATA)
    loop = ff.TrainLoop(module.init, task, 0, devices=jax.devices()[:1], stdout=False)
    assert np.isfinite(loop.next_step().loss)
    assert calls == ["init", "apply", "apply"]
