"""A precision that does not reach the products of a module is said once."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import drawn
from marks import thorough

import flaxfit as ff

X = np.ones((8, 6, 6, 1), np.float32)


class Net(nn.Module):
    dtype: object = None

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(2, (3, 3), dtype=self.dtype)(nn.Dense(3)(x))
        return nn.Dense(1, dtype=self.dtype)(x.reshape(len(x), -1))[:, 0]


def squared(outputs, targets):  # Its own product is in float32 on purpose.
    return ((outputs - targets)[:, None] @ jnp.ones((1, 1)))[:, 0] ** 2


def make_loop(dtype, precision, strategy):
    module, data = Net(dtype), [(X, X[:, 0, 0, 0])]
    task = ff.TrainTask(module.apply, optax.sgd(0.1), squared, data, precision=precision)
    return ff.TrainLoop(drawn(module, X), task, 0, strategy=strategy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [thorough(ff.DataParallel), ff.Sharded.fsdp])
def test_products_in_float32_are_counted_and_said_once(strategy, capsys):
    loop = make_loop(jnp.float32, "bfloat16", strategy(devices=jax.devices()[:2]))
    next(loop)
    loop.data = [(X, X[:, 0, 0, 0])]
    next(loop)
    text = " ".join(capsys.readouterr().err.split())
    assert text.count("precision='bfloat16' has no effect on 2 of 3 products: the module comp") == 1
    assert "in float32. Where it sets dtype=float32, set dtype=None or jnp.bfloat16" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (None, "bfloat16"),
        thorough(jnp.bfloat16, "bfloat16"),
        (jnp.float32, None),
        thorough(jnp.float32, "float32"),
    ],
)
def test_where_it_reaches_all_products_nothing_is_said(dtype, precision, capsys):
    next(make_loop(dtype, precision, ff.DataParallel(jax.devices()[:1])))
    assert "has no effect" not in capsys.readouterr().err
