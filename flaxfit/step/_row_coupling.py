"""Whether a program combines the rows of a batch, judged by its jaxpr."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from flaxfit.step._jaxpr import parts_of
from flaxfit.tree._types import ArrayLike

_Makers: TypeAlias = Mapping[Var, JaxprEqn | ArrayLike]

# Primitives that combine or move the elements along an axis, and the parameter that names it.
_ALONG_AXIS = {
    "cumsum": "axis",
    "cumprod": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumlogsumexp": "axis",
    "sort": "dimension",
    "rev": "dimensions",
}
# Primitives that return what a program in them returns, in the same order.
_CALLS = {"jit", "pjit", "closed_call", "checkpoint", "cond"} | {
    f"custom_{kind}_call{end}" for kind in ("jvp", "vjp") for end in ("", "_jaxpr")
}
# Primitives that keep a number where it is, and which operand holds it.
_IN_PLACE = {"broadcast_in_dim": 0, "reshape": 0, "convert_element_type": 0, "select_n": 1}


class _Needed(NamedTuple):
    """An equation of a jaxpr that the results depend on."""

    equation: JaxprEqn
    results: list[Var]
    """Those that are needed."""
    makers: _Makers
    """The equations of the same program by what they result in, and the values of constants."""


def mixes_rows(program: Jaxpr, n: int) -> bool:
    """Whether what a closed jaxpr returns was made by combining rows along axes of size `n`."""
    return any(_mixes(each, n) for each in _needed(program, [True] * len(program.jaxpr.outvars)))


def numbers(program: Jaxpr) -> list[str]:
    """The floating-point numbers in a closed jaxpr that its results depend on, as texts."""
    literals = [
        v.val
        for each in _needed(program, [True] * len(program.jaxpr.outvars))
        for v in each.equation.invars
        if isinstance(v, Literal)
    ]
    return [str(x) for x in literals if jnp.issubdtype(jnp.result_type(x), jnp.floating)]


def _needed(program: Jaxpr, wanted: list[bool]) -> Iterator[_Needed]:
    """The equations that the wanted results depend on, those of inner programs included."""
    constants = {}
    if hasattr(program, "jaxpr"):
        constants = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
        program = program.jaxpr
    makers = constants | {v: each for each in program.eqns for v in each.outvars}
    chosen = [v for v, is_wanted in zip(program.outvars, wanted, strict=True) if is_wanted]
    needed = {v for v in chosen if not isinstance(v, Literal)}
    for equation in reversed(program.eqns):
        is_needed = [v in needed for v in equation.outvars]
        if not any(is_needed):
            continue
        needed |= {v for v in equation.invars if not isinstance(v, Literal)}
        yield _Needed(equation, [v for v in equation.outvars if v in needed], makers)
        condition = equation.params.get("cond_jaxpr")  # Of a loop, which it only ends.
        for inner in parts_of(equation):
            if inner is condition:
                continue
            n_results = len(getattr(inner, "jaxpr", inner).outvars)
            is_call = equation.primitive.name in _CALLS and n_results == len(is_needed)
            yield from _needed(inner, is_needed if is_call else [True] * n_results)


def _mixes(needed: _Needed, n: int) -> bool:
    """Whether an equation on arrays with an axis of rows combines these."""
    equation, name = needed.equation, needed.equation.primitive.name
    if name in _CALLS or not any(_axes(v, n) for v in equation.invars):
        return False
    if any(len(_axes(v, n)) != 1 for v in needed.results):
        return True
    if _is_by_index(equation):
        return not _in_order(needed, n, n)
    if name == "dynamic_update_slice":
        old, new, *_ = equation.invars
        return any(_shape(old)[axis] != _shape(new)[axis] for axis in _axes(old, n))
    axis = equation.params.get(_ALONG_AXIS.get(name, ""), ())
    axes = axis if isinstance(axis, tuple) else (axis,)
    return any(axis in _axes(v, n) for v in equation.invars for axis in axes)


def picks_in_order(program: Jaxpr, n: int, count: int) -> bool:
    """Whether the rows 0, 1, ... `count - 1` of an array with `n` are read or set by index."""
    return any(
        _rows_by_index(each.equation, n) and _in_order(each, n, count)
        for each in _needed(program, [True] * len(program.jaxpr.outvars))
        if _is_by_index(each.equation)
    )


def pairs_rows(program: Jaxpr, n: int, count: int) -> bool:
    """Whether a closed jaxpr makes an array with axes of both numbers of rows."""
    return any(
        _axes(v, n) and _axes(v, count)
        for each in _needed(program, [True] * len(program.jaxpr.outvars))
        for v in each.results
    )


def _is_by_index(equation: JaxprEqn) -> bool:
    """Whether this is a gather or a scatter."""
    return equation.primitive.name.partition("-")[0] in ("gather", "scatter")


def _in_order(needed: _Needed, n: int, count: int) -> bool:
    """Whether rows are read or set by the numbers 0, 1, ... `count - 1`, if by any."""
    indices = needed.equation.invars[1]
    return all(
        _counts_rows(indices, column, needed.makers, size // n * count)
        for column, size in _rows_by_index(needed.equation, n)
    )


def _rows_by_index(equation: JaxprEqn, n: int) -> list[tuple[int, int]]:
    """The columns of the indices that number rows, and how many of these the array has."""
    array, numbers = equation.invars[0], equation.params["dimension_numbers"]
    is_read = equation.primitive.name == "gather"
    columns = numbers.start_index_map if is_read else numbers.scatter_dims_to_operand_dims
    return [
        (columns.index(axis), _shape(array)[axis]) for axis in _axes(array, n) if axis in columns
    ]


def _counts_rows(indices: Var | Literal, column: int, makers: _Makers, n: int) -> bool:
    """Whether a column of indices holds 0, 1, ... `n - 1`."""
    maker = None if isinstance(indices, Literal) else makers.get(indices)
    if maker is None or not hasattr(maker, "primitive"):
        return maker is not None and np.array_equal(np.ravel(maker), np.arange(n))
    name = maker.primitive.name
    if name == "iota":
        return maker.params["shape"][maker.params["dimension"]] == n
    if name == "concatenate":
        # Each operand is a column.
        return len(maker.invars) > column and _counts_rows(maker.invars[column], 0, makers, n)
    place = _IN_PLACE.get(name)
    return place is not None and _counts_rows(maker.invars[place], column, makers, n)


def _axes(variable: Var | Literal, n: int) -> list[int]:
    """The axes of rows of a variable; several rows may be joined in one axis."""
    return [axis for axis, size in enumerate(_shape(variable)) if size and size % n == 0]


def _shape(variable: Var | Literal) -> tuple[int, ...]:
    return getattr(variable.aval, "shape", ())
