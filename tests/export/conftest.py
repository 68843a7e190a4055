"""Fixtures of the tests of export: a small model that looks trained, and its inputs."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from loops import waves

from flaxfit.export import InputSpec, JaxModule

# TensorFlow says a line about oneDNN when it is loaded, and threads cost more than they gain.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


class Net(nn.Module):
    """Dropout and BatchNorm: what has to be switched off and frozen."""

    train: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(5, kernel_init=waves)(x)
        x = nn.BatchNorm(use_running_average=not self.train)(x)
        x = nn.Dropout(0.5, deterministic=not self.train)(x)
        return nn.Dense(2, kernel_init=waves)(jnp.tanh(x))


@pytest.fixture(scope="session")
def net():
    return Net()


@pytest.fixture(scope="session")
def variables(net):
    variables = jax.jit(net.init)(jax.random.key(0), jnp.ones((1, 3)))
    stats = jax.tree.map(lambda a: a + 0.5, variables["batch_stats"])
    return {"params": variables["params"], "batch_stats": stats}


@pytest.fixture(scope="session")
def apply(net):
    """The network compiled, for what is expected: as single operations it compiles for longer."""
    return jax.jit(net.apply)


@pytest.fixture
def module(net, variables):
    return JaxModule(variables, net.apply, input_spec=InputSpec(("batch", 3)))


@pytest.fixture
def double():
    """A module that is written in no time."""
    return JaxModule(np.float32(2), lambda p, x: p * x, input_spec=InputSpec(("b",)))


@pytest.fixture
def x():
    return np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "net.stablehlo"
