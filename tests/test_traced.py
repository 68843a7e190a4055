"""Traced: what was traced once is repeated as it was, and nothing is repeated that would differ."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxfit as ff
from flaxfit._traced import Traced

X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)


@jax.custom_vjp
def doubled_gradient(x):
    return x


doubled_gradient.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


class Everything(nn.Module):
    """What has derivatives, random bits, loops or statistics of its own."""

    @nn.compact
    def __call__(self, x):
        x = nn.remat(nn.Dense)(8)(x)
        x = nn.BatchNorm(use_running_average=False, axis_name="replica")(nn.gelu(x))
        x = nn.Dropout(0.5, deterministic=False)(doubled_gradient(x))
        x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x), None), x, None, length=3)
        self.sow("losses", "small", jnp.mean(x**2))
        return nn.Dense(2)(jnp.where(x > 0, x, nn.softplus(x)))


def trained(is_traced, strategy, monkeypatch, **options):
    if not is_traced:
        monkeypatch.setattr("flaxfit._stepper.takes_whole_batches", lambda strategy: False)
    stream = ff.ArrayStream(X, X[:, :2], batch_size=6, epochs=3)  # Each third is a remainder.
    task = ff.TrainTask(Everything().apply, optax.adam(0.1), "mse", stream, pad=False)
    *_, last = ff.TrainLoop(Everything().init, task, 0, strategy=strategy, stdout=False, **options)
    return last.state


@pytest.mark.parametrize("steps_per_call", [1, 2])
@pytest.mark.parametrize(
    "strategy",
    [lambda: ff.DataParallel(jax.devices()[:1]), lambda: ff.Sharded(devices=jax.devices()[:2])],
)
def test_training_has_the_same_bits_as_without(strategy, steps_per_call, monkeypatch):
    found, expected = (
        trained(is_traced, strategy(), monkeypatch, steps_per_call=steps_per_call)
        for is_traced in (True, False)
    )
    assert found.model_state["batch_stats"]
    jax.tree.map(np.testing.assert_array_equal, found.variables, expected.variables)
    jax.tree.map(np.testing.assert_array_equal, found.opt_state, expected.opt_state)


def test_arrays_and_other_arguments_tell_calls_apart():
    seen = []

    @Traced
    def function(x, *, scale, names):
        seen.append((x.shape, x.dtype, scale))
        return {name: x * scale for name in names}

    program = jax.jit(function, static_argnames=("scale", "names"))
    for x in (np.ones(2, np.float32), np.ones(3, np.float32), np.ones(2, np.int32), 1.0):
        for scale in (2, 3):
            found = program(x, scale=scale, names=("a", "b"))
            np.testing.assert_array_equal(found["b"], x * scale)
            assert found["a"].weak_type == isinstance(x, float)
    n = len(seen)
    assert n == len(set(seen)) == 8
    jax.jit(lambda x: function(x + 1, scale=2, names=("a", "b")))(np.ones(2, np.float32))
    assert len(seen) == n


def test_what_cannot_be_told_apart_is_called_as_it_is():
    seen = []
    function = Traced(lambda x, option: seen.append(option) or x)
    for _ in range(2):
        assert jax.jit(lambda x: function(x, np.random))(1.0) == 1
    assert len(seen) == 1  # A module has a hash.

    for n in (1, 2):
        assert jax.jit(lambda x: function(x, {1}))(1.0) == 1
        assert len(seen) == 1 + n


def test_a_part_of_a_batch_is_not_taken_for_a_first_batch_of_its_size():
    """The axis is as long as there are devices, where the batch that is looked at is alone."""

    def apply(variables, x, **_):
        n = jax.lax.psum(1, "replica")
        return x * variables["params"], {"seen": jnp.float32(n)}

    state = ff.TrainState.create(optax.sgd(0.0), {"params": jnp.ones(()), "seen": jnp.zeros(())})
    batches = [(X[:4], X[:4]), (X, X)]
    task = ff.TrainTask(apply, optax.sgd(0.0), "mse", batches, pad=False)
    loop = ff.TrainLoop(state, task, 0, devices=jax.devices()[:4], stdout=False)
    *_, last = loop
    assert float(last.state.model_state["seen"]) == 4
