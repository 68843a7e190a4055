"""Errors of nnx modules that name the layer which they come from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flaxfit as ff
from flaxfit.modules import from_nnx

X = np.ones((8, 5), np.float32)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("call", ["predict", "evaluate", "fit"])
def test_inputs_of_another_width_are_refused_by_the_layer_that_cannot_take_them(call):
    model = ff.Model(Net(nnx.Rngs(0)), optax.sgd(0.1), "mse")
    data = (X,) if call == "predict" else (X, X[:, :1])
    expected = (
        r"cannot take inputs of shape \(8, 5\): its Linear at layers/0 \(bias \(3,\), "
        r"kernel \(4, 3\)\) expects other shapes. .* got \(5,\) and \(4,\)"
    )
    with pytest.raises(ValueError, match=expected) as caught:
        getattr(model, call)(*data, batch_size=8)
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize(
    ("kind", "arguments", "shape"),
    [
        (nnx.Conv, (3, 4, (3, 3)), (2, 8, 8, 5)),
        (nnx.BatchNorm, (4,), (2, 5)),
        (nnx.LayerNorm, (4,), (2, 5)),
        (nnx.Einsum, ("ij,jk->ik", (4, 2)), (2, 5)),
        (functools.partial(nnx.MultiHeadAttention, decode=False), (2, 4), (2, 3, 5)),
    ],
    ids=["Conv", "BatchNorm", "LayerNorm", "Einsum", "MultiHeadAttention"],
)
def test_layers_of_each_kind_are_named(kind, arguments, shape):
    layer = kind(*arguments, rngs=nnx.Rngs(0))
    init, apply = from_nnx(layer, train=True)
    with pytest.raises(ValueError, match=rf"its {type(layer).__name__} \(.*\) expects other"):
        apply(init(None), jnp.ones(shape))


class Own(nnx.Module):
    def __init__(self, rngs):
        self.w, self.linear = nnx.Param(jnp.ones((4, 1))), nnx.Linear(5, 5, rngs=rngs)

    def __call__(self, x, how):
        x = self.linear(x)
        return x @ self.w if how == "product" else self.linear(x, out_sharding="no such")


@pytest.mark.parametrize("how", ["product", "argument"])
def test_errors_of_the_models_own_code_and_of_other_kinds_stay_as_they_are(how):
    init, apply = from_nnx(Own(nnx.Rngs(0)))
    with pytest.raises(Exception) as caught:
        apply(init(jax.random.key(0)), X, how=how)
    assert "cannot take inputs" not in str(caught.value)
