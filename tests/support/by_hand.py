"""What comparisons with a training loop by hand share."""

import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from loops import given


def drawn(module, *inputs, **named):
    """An `init` of random weights for a linen module, which compiles no program."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs, **named)
    rng = np.random.default_rng(0)
    variables = jax.tree.map(lambda s: rng.normal(0, 0.2, s.shape).astype(s.dtype), shapes)
    return given(lambda rngs, *_, **__: variables)


def assert_agree(found, expected):
    """That the arrays of two trees differ by at most 1e-6, relative to the norm of each."""
    found, expected = (jax.tree.leaves(jax.device_get(each)) for each in (found, expected))
    for a, b in zip(found, expected, strict=True):
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)


def n_lines(function):
    """The lines of code of a function, without its docstring."""
    source = inspect.getsource(function).replace(f'    """{function.__doc__}"""\n', "")
    return sum(bool(line.strip()) for line in source.splitlines())


class Seen(NamedTuple):
    value: jax.Array
    value_there: jax.Array
    grad: jax.Array
    grad_there: jax.Array


def probe(rate):
    """Descends, and keeps what it was passed, and what the functions give at its parameters."""

    def init(params):
        none = jax.tree.map(jnp.zeros_like, params)
        return Seen(jnp.zeros(()), jnp.zeros(()), none, none)

    def update(updates, state, params=None, *, value, grad, value_fn, **extra):
        seen = Seen(value, value_fn(params), grad, jax.grad(value_fn)(params))
        return jax.tree.map(lambda g: -rate * g, updates), seen

    return optax.GradientTransformationExtraArgs(init, update)


def lbfgs():
    """An optimizer that evaluates the loss along a line."""
    return optax.lbfgs(memory_size=3, linesearch=optax.scale_by_zoom_linesearch(4))
