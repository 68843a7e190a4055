"""The small models, tasks and loops that tests of the training loop share."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from marks import thorough

import flaxfit as ff

rng = np.random.default_rng(0)
X = rng.normal(size=(64, 5)).astype(np.float32)
Y = X.sum(1)
OPTIMIZER = optax.adamw(1e-2, weight_decay=0.1)


def waves(key, shape, dtype=np.float32):
    """Weights without a random draw, which takes longer to compile than what is tested here."""
    return np.sin(np.arange(np.prod(shape)), dtype=dtype).reshape(shape)


def small_waves(key, shape, dtype=np.float32):
    """Smaller ones."""
    return 0.1 * waves(key, shape, dtype)


class Regressor(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8)(x))
        x = nn.Dropout(self.dropout, deterministic=self.dropout == 0)(x)
        return nn.Dense(1)(x)[:, 0]


class Normalized(nn.Module):
    """BatchNorm, dropout, and a counter that a mean over replicas would spoil."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, x):
        count = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            count.value += 1
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(8, use_bias=False)(x))
        x = nn.Dropout(self.dropout, deterministic=self.dropout == 0)(nn.relu(x))
        return nn.Dense(1)(x)[:, 0]


def some_devices(*usual):
    """Numbers of devices to try; all but the usual ones are thorough, and eight if there are.

    test_eight_devices.py runs such tests once more, on eight devices.
    """
    numbers = [n for n in (1, 2, 3, 4, 8) if n <= len(jax.devices())]
    return [n if n in (*usual, 8) else thorough(n) for n in numbers]


def make_task(module=None, data=None, optimizer=None, **options):
    module = module or Regressor()
    if data is None:
        data = ff.ArrayStream(X, Y, batch_size=16, shuffle=True)
    options = {"metrics": ["mae"], **options}
    return ff.TrainTask(module.apply, optimizer or OPTIMIZER, "mse", data, **options)


def given(init):
    """An `init` that says that it draws nothing, so that loops need no program for it."""
    init.gives_weights = True
    return init


@functools.cache
def init_of(module, width=X.shape[1]):
    """An `init` of weights that are drawn once, when first used, for inputs of that width."""

    @functools.cache
    def variables():
        return jax.device_get(jax.jit(module.init)(jax.random.key(0), np.zeros((1, width))))

    return given(lambda rngs, x: variables())


def make_loop(module=None, data=None, *, optimizer=None, task=None, **options):
    module = module or Regressor()
    task = task or make_task(module, data, optimizer)
    init = module.init if "rnkey" in options else init_of(module)
    options = {"rnkey": 0, "devices": jax.devices()[:1], "stdout": False, **options}
    return ff.TrainLoop(init, task, **options)


def assert_equal(a, b):
    """That two trees are the same bit for bit, random keys included."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


def assert_close(a, b, **tolerance):
    """That two trees of one structure hold nearly the same numbers."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def assert_identical(one, other):
    """That two trees have one structure, shapes, dtypes and bits, random keys included."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def make_weight_loop(callbacks=(), data=None, **options):
    """A loop that trains one weight, by which the inputs are multiplied; it compiles in no time."""
    x = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]

    @given
    def init(rngs, x):
        return {"params": np.zeros(1, np.float32)}

    def apply(variables, x, **_):
        return variables["params"] * x, {}

    task = ff.TrainTask(apply, optax.sgd(0.1), "mse", (x, 2 * x) if data is None else data)
    options = {"rnkey": 0, "n_steps": 3, "stdout": False, **options}
    return ff.TrainLoop(init, task, callbacks=callbacks, **options)
