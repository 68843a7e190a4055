"""Models that add all of their loss themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from marks import thorough

import flaxfit as ff

X = np.random.default_rng(0).normal(size=(22, 3)).astype("f4")


class Kl(nnx.Variable):
    """A term of the loss."""


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones((3, 1)))

    def __call__(self, x):
        y = x @ self.w[...]
        self.kl = Kl(jnp.square(y).mean())
        return y


class Linen(nn.Module):
    collection: str = "losses"

    @nn.compact
    def __call__(self, x):
        y = x @ self.param("w", nn.initializers.ones, (3, 1))
        self.sow(self.collection, "size", jnp.square(y).mean())
        return y


class Quiet(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        y = x @ self.param("w", nn.initializers.ones, (3, 1))
        if train:
            self.sow("losses", "size", jnp.square(y).mean())
        return y


MODELS = [(Linen(), ()), (Linen("kl"), "kl"), (Nnx, Kl)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "losses", "n_devices"),
    [(*MODELS[0], 2), (*MODELS[1], 1), (*MODELS[2], 2), thorough(*MODELS[0], 1)],
    ids=["linen", "name", "nnx", "linen alone"],
)
def test_what_the_model_adds_is_the_loss(module, losses, n_devices):
    """Without targets; the last batch is not padded, so that the means are those of its rows."""
    strategy = ff.DataParallel(jax.devices()[:n_devices])
    model = ff.Model(module, optax.sgd(0.1), losses=losses, strategy=strategy)
    w, expected, n = jnp.ones((3, 1)), [], 8

    def loss(w, x):
        return jnp.mean((x @ w) ** 2)

    for i in range(0, 22, n):
        value, slope = jax.value_and_grad(loss)(w, X[i : i + n])
        expected.append(value)
        w -= 0.1 * slope
    history = model.fit(X, batch_size=n, shuffle=False, verbose=0)
    sizes = [8, 8, 6]
    assert history["loss"][0] == pytest.approx(np.average(expected, weights=sizes), rel=1e-5)
    found = model.evaluate(X, batch_size=n)
    (kernel,) = jax.tree.leaves(model.state.params)
    np.testing.assert_allclose(kernel, w, rtol=1e-5)
    assert found == pytest.approx(dict.fromkeys(["loss", "penalty"], float(loss(w, X))), rel=1e-5)


def test_the_loss_of_a_model_is_measured_beside_another():
    y = np.ones((22, 1), "f4")
    found = ff.Model(Linen("kl"), None, "mse", losses="kl").evaluate(X, y, batch_size=8)
    outputs = X.sum(1, keepdims=True)
    assert found["penalty"] == pytest.approx(np.mean(outputs**2), rel=1e-5)
    assert found["loss"] == pytest.approx(np.mean((outputs - y) ** 2), rel=1e-5)
    assert ff.Model(Quiet(), None, "mse").evaluate(X, y).keys() == {"loss"}


def test_evaluation_refuses_a_loss_that_is_added_in_training_alone():
    """Instead of reporting a loss of 0."""
    with pytest.raises(TypeError, match="the model adds none in evaluation"):
        ff.Model(Quiet(), optax.sgd(0.1)).evaluate(X)
