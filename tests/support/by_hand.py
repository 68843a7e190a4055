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


class ByHand:
    """A loop by hand: the parameters, and in `found` what each step measures, the loss first.

    `measure(params, *batch)` returns the loss, or the loss and further measures.
    """

    def __init__(self, optimizer, params, measure):
        self.params, self.found, self._opt_state = params, [], optimizer.init(params)

        @jax.jit
        def update(params, opt_state, *batch):
            def loss_of(params):
                found = measure(params, *batch)
                return found[0] if isinstance(found, tuple) else found, found

            (_, found), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, found

        self._update = update

    def step(self, *batch):
        self.params, self._opt_state, found = self._update(self.params, self._opt_state, *batch)
        self.found.append(jax.tree.map(float, found))


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
