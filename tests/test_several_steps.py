"""Several steps in one dispatch come to what single ones come to, with the usual networks."""

from pydoc_data.topics import topics

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from sklearn.datasets import load_digits

import flaxfit as ff


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (8, 16):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


class Transformer(nn.Module):
    length: int

    @nn.compact
    def __call__(self, x):
        x = nn.Embed(128, 32)(x) + nn.Embed(self.length, 32)(np.arange(self.length))
        causal = nn.make_causal_mask(np.ones((1, self.length)))
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=causal)
            x = x + nn.Dense(32)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))
        return nn.Dense(128)(nn.LayerNorm()(x))


def digits():
    x, y = load_digits(return_X_y=True)
    return (x[:512] / 16).astype(np.float32), y[:512].astype(np.int32)


def text(length=16):
    """Characters of Python's help texts, and the next ones."""
    text = "".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    characters = np.frombuffer(text[: 512 * length + 1], np.uint8).astype(np.int32)
    return characters[:-1].reshape(-1, length), characters[1:].reshape(-1, length)


def train(module, x, y, **options):
    task = ff.TrainTask(
        module.apply,
        optax.adam(1e-3),
        "crossentropy",
        ff.ArrayStream(x, y, batch_size=32, shuffle=True),
        ["accuracy"],
    )
    options |= {"n_steps": 24, "n_steps_per_checkpoint": 10, "devices": jax.devices()[:1]}
    loop = ff.TrainLoop(module.init, task, 0, stdout=False, **options)
    seen = []
    loop.watchers.append(seen.append)
    checkpoints = list(loop)
    assert (len(seen) == 24) == (loop.steps_per_call == 1)
    return checkpoints


@pytest.mark.parametrize(
    ("module", "data"),
    [
        pytest.param(nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(10)]), digits, id="mlp"),
        pytest.param(Transformer(16), text, id="transformer"),
    ],
)
def test_they_are_the_same_to_the_bit(module, data):
    single, several = train(module, *data()), train(module, *data(), steps_per_call=8)
    assert [c.step for c in several] == [c.step for c in single] == [1, 11, 21, 24]
    for a, b in zip(single, several, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a.state.params, b.state.params)
        jax.tree.map(np.testing.assert_array_equal, a.optimizer_state, b.optimizer_state)


def test_convolutions_are_the_same_but_for_roundoff():
    x, y = digits()
    data = x.reshape(-1, 8, 8, 1), y
    single, several = train(Convolutions(), *data), train(Convolutions(), *data, steps_per_call=8)
    for a, b in zip(single, several, strict=True):
        jax.tree.map(
            lambda p, q: np.testing.assert_allclose(p, q, rtol=0, atol=1e-6),
            a.state.params,
            b.state.params,
        )
