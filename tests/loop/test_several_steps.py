"""Several steps in one dispatch come to what single ones come to, with the usual networks."""

from pydoc_data.topics import topics

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from sklearn.datasets import load_digits

import flaxfit as ff

ON_CPU = jax.default_backend() == "cpu"
ONE = jax.devices()[:1]


class Convolutions(nn.Module):
    features: tuple[int, ...] = (8, 16)
    width: int = 32

    @nn.compact
    def __call__(self, x):
        for features in self.features:
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(self.width)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


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


def images(size=8):
    """Digits as images, enlarged."""
    x, y = digits()
    scale = -(-size // 8)
    x = np.kron(x.reshape(-1, 8, 8), np.ones((1, scale, scale), np.float32))
    return x[:, :size, :size, None], y


def text(length=16):
    """Characters of Python's help texts, and the next ones."""
    text = "".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    characters = np.frombuffer(text[: 512 * length + 1], np.uint8).astype(np.int32)
    return characters[:-1].reshape(-1, length), characters[1:].reshape(-1, length)


def train(module, x, y, *, start=None, **options):
    """The checkpoints, and the steps behind each dispatch."""
    loop = make_loop(module, x, y, **options)
    if start is not None:
        loop.restore(start)
    dispatched = []
    loop.watchers.append(dispatched.append)
    return list(loop), dispatched


def make_loop(
    module,
    x,
    y,
    *,
    spacing,
    first=1,
    steps_per_call=1,
    devices=1,
    strategy=None,
    **options,
):
    data = ff.ArrayStream(x, y, batch_size=32, shuffle=True)
    task = ff.TrainTask(
        module.apply, optax.adam(1e-3), "crossentropy", data, ["accuracy"], **options
    )
    return ff.TrainLoop(
        module.init,
        task,
        0,
        n_steps=25,
        n_steps_per_checkpoint=spacing,
        first_checkpoint=first,
        strategy=strategy or ff.DataParallel(jax.devices()[:devices]),
        steps_per_call=steps_per_call,
        stdout=False,
    )


@pytest.mark.parametrize(
    ("module", "data"),
    [
        pytest.param(nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(10)]), digits, id="mlp"),
        pytest.param(Transformer(16), text, id="transformer"),
    ],
)
def test_they_are_the_same_to_the_bit(module, data):
    single, _ = train(module, *data(), spacing=10)
    several, dispatched = train(module, *data(), spacing=10, steps_per_call=8)
    assert [c.step for c in several] == [c.step for c in single] == [1, 11, 21, 25]
    assert dispatched == [1, 9, 11, 19, 21, 25]
    for a, b in zip(single, several, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a.state.params, b.state.params)
        jax.tree.map(np.testing.assert_array_equal, a.optimizer_state, b.optimizer_state)


# The larger one is that of the benchmarks: its gradients in a loop would be rounded otherwise, and
# Adam, which divides even the smallest by their size, would take it farther than that.
@pytest.mark.parametrize(
    ("module", "size", "options"),
    [
        pytest.param(Convolutions(), 8, {}, id="small"),
        pytest.param(Convolutions((32, 64), 256), 28, {}, id="large"),
        pytest.param(Convolutions(), 8, {"devices": 2}, id="replicas"),
        pytest.param(Convolutions(), 8, {"strategy": ff.Sharded()}, id="sharded"),
    ],
)
def test_convolutions_are_the_same_but_for_roundoff(module, size, options):
    single, _ = train(module, *images(size), spacing=8, **options)
    several, dispatched = train(module, *images(size), spacing=8, steps_per_call=8, **options)
    if ON_CPU:  # Where up to four steps are written out, and there is no loop.
        assert dispatched == [1, 5, 9, 13, 17, 21, 25]
    for a, b in zip(single, several, strict=True):
        jax.tree.map(
            lambda p, q: np.testing.assert_allclose(p, q, rtol=0, atol=1e-6),
            a.state.params,
            b.state.params,
        )


@pytest.mark.skipif(not ON_CPU, reason="about XLA's loops on a CPU")
@pytest.mark.parametrize(
    "options",
    [{"accumulate": 2}, {"strategy": ff.DataParallel(ONE, virtual_replicas=2)}],
    ids=["parts", "virtual"],
)
def test_what_is_in_a_loop_anyway_is_not_written_out(options):
    _, dispatched = train(Convolutions(), *images(), spacing=8, steps_per_call=8, **options)
    assert dispatched == [1, 9, 17, 25]


@pytest.mark.skipif(not ON_CPU, reason="about XLA's loops on a CPU")
def test_which_steps_are_written_out_together_is_told_by_the_position_alone():
    x, y = images()
    # Six batches and a remainder that is a program of its own.
    options = {"spacing": 12, "steps_per_call": 12, "pad": False}
    data = x[:208], y[:208]
    whole, dispatched = train(Convolutions(), *data, first=12, **options)
    # The first of all, too, which nothing was looked at before.
    assert dispatched == [4, 5, 6, 7, 11, 12, 13, 14, 18, 19, 20, 21, 24, 25]
    rest, again = train(Convolutions(), *data, first=12, start=whole[0], **options)
    assert again == dispatched[6:]
    for a, b in zip(whole[1:], rest, strict=True):
        assert a.metrics == b.metrics
        jax.tree.map(np.testing.assert_array_equal, a.state.params, b.state.params)
        jax.tree.map(np.testing.assert_array_equal, a.optimizer_state, b.optimizer_state)


@pytest.mark.skipif(not ON_CPU, reason="about XLA's loops on a CPU")
def test_no_batch_is_fetched_ahead_of_the_steps_that_are_written_out():
    loop = make_loop(Convolutions(), *images(), spacing=8, first=8, steps_per_call=8)
    found = []
    loop.watchers.append(lambda step: found.append(loop.snapshot()))
    next(loop)
    assert [each.step for each in found] == [4, 8]
