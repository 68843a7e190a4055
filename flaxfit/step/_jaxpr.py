"""Queries of a jaxpr: inner jaxprs, certain primitives, and the number of operations."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from flaxfit.tree import PyTree, tangents

_OF_UNKNOWN_LENGTH = ("while", "pallas_call", "ffi_call", "pure_callback", "io_callback")


def parts_of(equation: JaxprEqn) -> list[Jaxpr]:
    """Returns the jaxprs in the parameters of an equation, such as the body of a loop."""
    parameters = jax.tree.leaves(tuple(equation.params.values()), is_leaf=_is_program)
    return [each for each in parameters if _is_program(each)]


def with_derivatives(equation: JaxprEqn) -> Any:
    """Traces an equation as `(operands, directions) -> (results, derivatives)`, by its own rule.

    The operands are those that are no literals.
    """
    operands: list[Any] = [each for each in equation.invars if not isinstance(each, Literal)]
    parts = {"invars": operands, "outvars": [*equation.outvars], "eqns": [equation]}
    closed = jax.make_jaxpr(lambda: ())()
    run = jaxpr_as_fun(type(closed)(closed.jaxpr.replace(**parts), ()))

    def both(operands: list[PyTree], directions: list[PyTree]) -> PyTree:
        along = tangents(lambda _, direction: direction, operands, directions)
        return jax.jvp(lambda operands: run(*operands), (operands,), (along,))

    shapes = [jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype) for each in operands]
    return jax.make_jaxpr(both)(shapes, shapes)


def holds(program: Jaxpr, name: str) -> bool:
    """Returns whether a jaxpr, or any inner one, holds a primitive of this name."""
    return any(equation.primitive.name == name for equation in equations(program))


def computes_in_16_bits(program: Jaxpr) -> bool:
    """Returns whether an equation of a jaxpr has a float result of fewer than 32 bits."""
    dtypes: set[Any] = {
        getattr(x.aval, "dtype", None) for each in equations(program) for x in each.outvars
    }
    return any(jnp.issubdtype(x, jnp.inexact) and x.itemsize < 4 for x in dtypes - {None})


def names_axis(program: Jaxpr) -> bool:
    """Returns whether an equation of a jaxpr names a mapped axis, as `lax.psum` does."""
    for equation in equations(program):
        named = (equation.params.get(name, ()) for name in ("axes", "axis_name"))
        if any(isinstance(axis, str) for axis in jax.tree.leaves(tuple(named))):
            return True
    return False


def depends_on(program: Jaxpr, first: int) -> bool:
    """Returns whether the results of a closed jaxpr depend on any of its inputs `[first:]`."""
    needed = {v for v in program.jaxpr.outvars if not isinstance(v, Literal)}
    for equation in reversed(program.eqns):
        if needed & set(equation.outvars):
            needed |= {v for v in equation.invars if not isinstance(v, Literal)}
    return not needed.isdisjoint(program.jaxpr.invars[first:])


def equations(program: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields the equations of a jaxpr and of all inner ones; shared inner jaxprs only once."""
    seen: set[int] = set()
    left = [program]
    while left:
        one = left.pop()
        if (number := id(getattr(one, "jaxpr", one))) in seen:
            continue
        seen.add(number)
        for equation in one.eqns:
            yield equation
            left += parts_of(equation)


def n_operations(program: Jaxpr) -> float:
    """Estimates the arithmetic operations of a jaxpr; infinity for loops of unknown length.

    Products and convolutions count multiplications and additions; any other primitive counts one
    operation per element of its results.
    """
    known: dict[int, float] = {}

    def of_program(program: Jaxpr) -> float:
        number = id(getattr(program, "jaxpr", program))
        if number not in known:
            known[number] = float(sum(map(of_equation, program.eqns)))
        return known[number]

    def of_equation(equation: JaxprEqn) -> float:
        name, parameters = equation.primitive.name, equation.params
        if name in _OF_UNKNOWN_LENGTH:
            return math.inf
        if parts := parts_of(equation):
            return sum(map(of_program, parts)) * (parameters["length"] if name == "scan" else 1)
        n = sum(math.prod(getattr(out.aval, "shape", ())) for out in equation.outvars)
        shapes: list[tuple[int, ...]] = [
            getattr(each.aval, "shape", ()) for each in equation.invars
        ]
        if name == "dot_general":
            (contracted, _), _ = parameters["dimension_numbers"]
            return 2 * n * math.prod(shapes[0][axis] for axis in contracted)
        if name == "conv_general_dilated":
            n_out = shapes[1][parameters["dimension_numbers"].rhs_spec[0]]
            return 2 * n * math.prod(shapes[1]) / n_out
        return n

    return of_program(program)


def _is_program(part: object) -> bool:
    return hasattr(part, "eqns")  # `Jaxpr` or `ClosedJaxpr`, one class in some versions of JAX.
