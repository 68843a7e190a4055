"""What a jaxpr holds, wherever in its inner programs."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from flaxfit.step._jaxpr import depends_on, holds, n_operations


def convolve(x):
    return lax.conv(x, jnp.ones((1, 1, 2, 2)), (1, 1), "SAME")


@pytest.mark.parametrize(
    "function",
    [
        convolve,
        jax.jit(convolve),
        jax.checkpoint(convolve),
        jax.grad(lambda x: convolve(x).sum()),
        lambda x: lax.cond(x.sum() > 0, convolve, lambda x: x, x),
        lambda x: lax.fori_loop(0, 2, lambda _, x: convolve(x), x),
        lambda x: lax.map(convolve, x[None])[0],
    ],
    ids=["bare", "jit", "remat", "grad", "cond", "loop", "map"],
)
def test_a_convolution_is_found_wherever_it_is(function):
    program = jax.make_jaxpr(function)(jnp.ones((1, 1, 4, 4)))
    assert holds(program, "conv_general_dilated")
    assert not holds(program, "dot_general")


def test_programs_that_are_used_often_are_looked_at_once():
    def doubled(function, depth):
        return jax.jit(lambda x: function(function(x))) if depth else function

    function = jnp.sin
    for depth in range(40):  # 2**40 uses of the innermost, which none would see the end of.
        function = doubled(function, depth)
    assert not holds(jax.make_jaxpr(function)(1.0), "conv_general_dilated")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x @ x, 128),
        (lambda x: jnp.einsum("ij,kj->ik", x, x), 128),
        (jax.jit(lambda x: x @ x), 128),
        (lambda x: lax.scan(lambda c, _: (c @ x, None), x, length=5)[0], 5 * 128),
        (lambda x: lax.conv(x[None, None], jnp.ones((3, 1, 2, 2)), (1, 1), "SAME"), None),
        (lambda x: lax.while_loop(lambda x: x.max() > 1, lambda x: x / 2, x), math.inf),
    ],
    ids=["product", "einsum", "jit", "scan", "conv", "while"],
)
def test_operations_are_counted(function, expected):
    program = jax.make_jaxpr(function)(jnp.ones((4, 4)))
    if expected is None:  # A convolution of 4 x 4 pixels, 3 kernels of 2 x 2.
        assert 2 * 3 * 16 * 4 <= n_operations(program) <= 2 * 3 * 16 * 4 + 40
    else:
        assert n_operations(program) == expected


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, y: x + y, True),
        (lambda x, y: (x + y, x)[1], False),
        (lambda x, y: jax.jit(lambda a, b: (a, a * b))(x, y)[1], True),
        (lambda x, y: jnp.ones(3), False),
    ],
)
def test_results_depend_on_an_input_or_not(function, expected):
    assert depends_on(jax.make_jaxpr(function)(1.0, 2.0), 1) is expected
