"""What the tests of checkpoints share: states as a loop gives them, and their comparison."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_files import small_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from loops import assert_identical

from flaxfit import Checkpoint, init_state

ADAMW = optax.adamw(optax.linear_schedule(1e-2, 0.0, 100))


def waves(key, shape, dtype):
    """Weights without a random draw, which takes longer to compile than what is tested here."""
    return np.sin(np.arange(np.prod(shape))).reshape(shape).astype(dtype)


class Net(nn.Module):
    width: int = 5

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width, param_dtype=jnp.bfloat16, kernel_init=waves)(x)
        x = nn.BatchNorm(use_running_average=False)(x.astype(jnp.float32))
        self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
        return nn.Dense(2, kernel_init=waves)(nn.Dropout(0.5, deterministic=False)(x))


@functools.cache
def first_state(width, optimizer):
    """A state after a step, in arrays of NumPy."""

    @jax.jit
    def train():
        state = init_state(Net(width).init, optimizer, 0, (jnp.ones((4, 3)),))
        grads = jax.tree.map(jnp.ones_like, state.params)
        return state.apply_gradient(optimizer, grads).replace(key=None)

    return jax.device_get(train())


def make_state(step=0, width=5, optimizer=ADAMW):
    """A state of its own for every step, its buffers shared with nothing."""
    first = first_state(width, optimizer)
    params = jax.tree.map(lambda x: x + np.asarray(step, x.dtype), first.params)
    state = jax.tree.map(jnp.array, first.replace(step=np.int32(step), params=params))
    return state.replace(key=jax.random.key(step))


def make_checkpoint(step=0, **metrics):
    """One of few arrays, which are saved in half the time."""
    metrics = metrics or {"loss": 1 / (1 + step)}
    return Checkpoint(step=step, state=small_state(step), metrics=metrics)


def replicated(tree):
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def abstract(state):
    return jax.eval_shape(lambda: state)


@dataclasses.dataclass(frozen=True)
class Tools:
    make_state = staticmethod(make_state)
    make_checkpoint = staticmethod(make_checkpoint)
    replicated = staticmethod(replicated)
    abstract = staticmethod(abstract)
    assert_same = staticmethod(assert_identical)


@pytest.fixture(scope="session")
def tools():
    return Tools()
