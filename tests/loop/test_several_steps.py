"""Several steps in one dispatch give what single ones give; convolutions take single steps."""

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

ONE = jax.devices()[:1]


def on_cpu(test):
    is_cpu = jax.default_backend() == "cpu"
    skip = pytest.mark.skipif(not is_cpu, reason="about XLA's loops on a CPU")
    return pytest.mark.slow(skip(test))


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.avg_pool(nn.relu(nn.Conv(4, (3, 3))(x)), (2, 2), strides=(2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(8)(x.reshape(len(x), -1))))


def digits():
    x, y = load_digits(return_X_y=True)
    return (x[:512] / 16).astype(np.float32), y[:512].astype(np.int32)


def images():
    x, y = digits()
    return x.reshape(-1, 8, 8, 1), y


def loop_of(task, init, n_steps=25, spacing=8, **options):
    options = {"devices": ONE, "stdout": False, "n_steps_per_checkpoint": spacing, **options}
    return ff.TrainLoop(init, task, 0, n_steps=n_steps, **options)


def make_loop(module, x, y, *, accumulate=1, **options):
    data = ff.ArrayStream(x, y, batch_size=32, shuffle=True)
    optimizer, metrics = optax.adam(1e-3), ["accuracy"]
    task = ff.TrainTask(
        module.apply, optimizer, "crossentropy", data, metrics, accumulate=accumulate
    )
    return loop_of(task, module.init, **options)


def train(loop):
    """The checkpoints, and the steps behind each dispatch."""
    dispatched = []
    loop.watchers.append(dispatched.append)
    return list(loop), dispatched


@pytest.mark.slow
def test_they_are_the_same_to_the_bit():
    module = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(10)])
    single, _ = train(make_loop(module, *digits(), spacing=10))
    several, dispatched = train(make_loop(module, *digits(), spacing=10, steps_per_call=8))
    assert [c.step for c in several] == [c.step for c in single] == [1, 11, 21, 25]
    assert dispatched == [1, 9, 11, 19, 21, 25]
    for a, b in zip(single, several, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a.state.params, b.state.params)
        jax.tree.map(np.testing.assert_array_equal, a.optimizer_state, b.optimizer_state)


@on_cpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        thorough({"devices": jax.devices()[:2]}),
        thorough({"devices": None, "strategy": ff.Sharded()}),
    ],
    ids=["one", "replicas", "sharded"],
)
def test_convolutions_are_stepped_one_by_one_on_a_cpu_as_is_said_once(options, capsys):
    single, _ = train(make_loop(Convolutions(), *images(), **options))
    loop = make_loop(Convolutions(), *images(), steps_per_call=8, **options | {"stdout": True})
    snapshots = []  # No batch is fetched ahead.
    loop.watchers.append(lambda step: snapshots.append(loop.snapshot().step))
    several, dispatched = train(loop)
    assert dispatched == snapshots == list(range(1, 26))
    for a, b in zip(single, several, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a.state.params, b.state.params)
    assert capsys.readouterr().err.count("steps_per_call has no effect") == 1


@on_cpu
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2},
        thorough({"devices": None, "strategy": ff.DataParallel(ONE, virtual_replicas=2)}),
    ],
    ids=["parts", "virtual"],
)
def test_what_is_in_a_loop_anyway_is_stepped_together(options):
    _, dispatched = train(make_loop(Convolutions(), *images(), steps_per_call=8, **options))
    assert dispatched == [1, 9, 17, 25]


@on_cpu
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
    _, dispatched = train(loop_of(task, module.init, 13, 6, steps_per_call=6))
    assert max(np.diff([0, *dispatched])) == longest


@on_cpu
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

    def init(rngs, x):
        return {"params": {"scale": jnp.ones(())}}

    _, dispatched = train(loop_of(task, init, 24, 24, first_checkpoint=24, steps_per_call=2))
    assert {*np.diff([0, *dispatched]).tolist()} == {1, 2}
