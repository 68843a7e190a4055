"""Several steps in one dispatch come to what single ones come to, with the usual networks."""

from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from marks import thorough
from sklearn.datasets import load_digits

import flaxfit as ff

ON_CPU = jax.default_backend() == "cpu"
ONE = jax.devices()[:1]


class Convolutions(nn.Module):
    features: tuple[int, ...] = (4,)
    width: int = 8

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
    stdout=False,
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
        stdout=stdout,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "data"),
    [
        pytest.param(nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(10)]), digits, id="mlp"),
        thorough(Transformer(16), text, id="transformer"),
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


@pytest.mark.slow
@pytest.mark.skipif(not ON_CPU, reason="about XLA's loops on a CPU")
@pytest.mark.parametrize(
    "options",
    [{}, thorough({"devices": 2}), thorough({"strategy": ff.Sharded()})],
    ids=["one", "replicas", "sharded"],
)
def test_convolutions_are_stepped_one_by_one_on_a_cpu(options):
    single, _ = train(Convolutions(), *images(), spacing=8, **options)
    several, dispatched = train(Convolutions(), *images(), spacing=8, steps_per_call=8, **options)
    assert dispatched == list(range(1, 26))
    for a, b in zip(single, several, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a.state.params, b.state.params)


@pytest.mark.slow
@pytest.mark.skipif(not ON_CPU, reason="about XLA's loops on a CPU")
def test_it_is_said_once_that_convolutions_are_stepped_one_by_one(capsys):
    loop = make_loop(Convolutions(), *images(), spacing=8, steps_per_call=8, stdout=True)
    list(loop)
    assert capsys.readouterr().err.count("steps_per_call has no effect") == 1


@pytest.mark.slow
@pytest.mark.skipif(not ON_CPU, reason="about XLA's loops on a CPU")
@pytest.mark.parametrize(
    "options",
    [{"accumulate": 2}, thorough({"strategy": ff.DataParallel(ONE, virtual_replicas=2)})],
    ids=["parts", "virtual"],
)
def test_what_is_in_a_loop_anyway_is_stepped_together(options):
    _, dispatched = train(Convolutions(), *images(), spacing=8, steps_per_call=8, **options)
    assert dispatched == [1, 9, 17, 25]


@pytest.mark.slow
@pytest.mark.skipif(not ON_CPU, reason="about XLA's loops on a CPU")
def test_no_batch_is_fetched_ahead_of_steps_that_are_taken_one_by_one():
    loop = make_loop(Convolutions(), *images(), spacing=4, first=4, steps_per_call=4)
    found = []
    loop.watchers.append(lambda step: found.append(loop.snapshot()))
    next(loop)
    assert [each.step for each in found] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.skipif(not ON_CPU, reason="about XLA's loops on a CPU")
@pytest.mark.parametrize(("features", "longest"), [((3, 3), 1), ((), 6)])
def test_own_steps_with_convolutions_are_taken_one_by_one_too(features, longest):
    module: Any = nn.Conv(1, features) if features else nn.Dense(1)
    optimizer = optax.sgd(0.1)

    def step(state, batch):
        def loss(params):
            return jnp.mean(module.apply({"params": params}, *batch.inputs) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradient(optimizer, grads), {"loss": value}

    data = ff.ArrayStream(np.ones((8, 4, 4, 1), np.float32), batch_size=4)
    task = ff.TrainTask(module.apply, optimizer, None, data, step=step)
    loop = ff.TrainLoop(
        module.init,
        task,
        0,
        n_steps=13,
        n_steps_per_checkpoint=6,
        devices=jax.devices()[:1],
        steps_per_call=6,
        stdout=False,
    )
    dispatched = [0]
    loop.watchers.append(dispatched.append)
    list(loop)
    assert max(np.diff(dispatched)) == longest


@pytest.mark.slow
@pytest.mark.skipif(not ON_CPU, reason="about XLA's loops on a CPU")
def test_of_several_tasks_those_with_convolutions_are_stepped_one_by_one():
    optimizer, images = optax.sgd(0.1), np.ones((8, 4, 4, 1), np.float32)
    targets = np.ones((8, 1), np.float32)

    def of_dense(variables, x, **_):
        return x.mean((1, 2)) * variables["params"]["scale"], {}

    def of_convolutions(variables, x, **_):
        kernel = variables["params"]["scale"] * jnp.ones((1, 1, 2, 2))
        return lax.conv(x, kernel, (1, 1), "SAME").mean((2, 3)), {}

    task = ff.MultiTask(
        {
            name: ff.TrainTask(apply, optimizer, "mse", ff.ArrayStream(x, targets, batch_size=4))
            for name, apply, x in (
                ("dense", of_dense, images),
                ("convolving", of_convolutions, images.reshape(8, 1, 4, 4)),
            )
        },
        weights={"dense": 4.0},
    )
    loop = ff.TrainLoop(
        lambda rngs, x: {"params": {"scale": jnp.ones(())}},
        task,
        0,
        n_steps=24,
        n_steps_per_checkpoint=24,
        first_checkpoint=24,
        devices=jax.devices()[:1],
        steps_per_call=2,
        stdout=False,
    )
    dispatched = [0]
    loop.watchers.append(dispatched.append)
    list(loop)
    assert {*np.diff(dispatched).tolist()} == {1, 2}
