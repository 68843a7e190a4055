"""Checks that a loss or a metric treats the rows of a batch one by one."""

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from flaxfit.step._jaxpr import parts_of
from flaxfit.tree._types import ArrayLike, Function, PyTree

# Two sizes that no other dimension has: rows that are compared one by one must agree in number.
_NUMBERS = _N_OUTPUTS, _N_TARGETS = 10007, 10009
_Makers: TypeAlias = Mapping[Var, JaxprEqn | ArrayLike]
# Primitives that return what a program in them returns, in the same order.
_CALLS = {"jit", "pjit", "closed_call", "checkpoint", "cond"} | {
    f"custom_{kind}_call{end}" for kind in ("jvp", "vjp") for end in ("", "_jaxpr")
}
# Primitives that keep a number where it is, and which operand holds it.
_IN_PLACE = {"broadcast_in_dim": 0, "reshape": 0, "convert_element_type": 0, "select_n": 1}


def check_by_row(
    owner: str, function: Function, outputs: PyTree, targets: PyTree, advice: str = ""
) -> None:
    """Checks that `function(*outputs, *targets)` does not take other numbers of either.

    One that does broadcasts them against one another: outputs `(n, 1)` and targets `(n,)` make
    `(n, n)` differences, whose mean only looks like a loss.
    """
    if jax.tree.leaves(targets) and _takes_any_number(function, outputs, targets):
        shapes = [[leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (outputs, targets)]
        raise ValueError(
            f"{owner} broadcasts outputs against targets: it compares each output with every "
            f"target. Outputs have shapes {shapes[0]}, targets {shapes[1]}: reshape one of them, "
            f"such as targets[:, None].{advice}"
        )


def check_sums(name: str, measure: Function, outputs: PyTree, targets: PyTree) -> None:
    """Checks that the sums of a metric have the same shapes whatever the size of the batch.

    `measure(weights, *outputs, *targets)` is traced.
    """

    def shapes_for(n: int) -> PyTree:
        weights = jax.ShapeDtypeStruct((n,), "float32")
        sums = jax.eval_shape(measure, weights, *_resized(outputs, n), *_resized(targets, n))
        return jax.tree.map(lambda leaf: leaf.shape, sums)

    try:
        small, large = map(shapes_for, _NUMBERS)
    except Exception:  # It takes one batch size only.
        return
    if small != large:
        raise ValueError(
            f"The metric {name!r} measures arrays whose shape depends on the size of the batch, "
            "and these are added over batches and devices, element by element. Return sums, such "
            "as counts by class or by bin. For a value of all outputs at once use a callback that "
            "calls predict."
        )


def _takes_any_number(function: Function, outputs: PyTree, targets: PyTree) -> bool:
    outputs, targets = _resized(outputs, _N_OUTPUTS), _resized(targets, _N_TARGETS)
    try:
        closed = jax.make_jaxpr(function)(*outputs, *targets)
    except Exception:  # It takes equal numbers only, as it should.
        return False
    # An index beyond the rows is not an error in JAX: outputs[jnp.arange(len(targets)), targets].
    is_in_order = any(picks_in_order(closed, *each) for each in itertools.permutations(_NUMBERS))
    if is_in_order and not pairs_rows(closed, *_NUMBERS):
        return False
    program = closed.jaxpr
    used = {v for eqn in program.eqns for v in eqn.invars if not isinstance(v, Literal)}
    used |= {v for v in program.outvars if not isinstance(v, Literal)}
    n_outputs = len(jax.tree.leaves(outputs))
    both = program.invars[:n_outputs], program.invars[n_outputs:]
    # A function of the outputs alone, or of the targets, compares nothing.
    return all(any(v in used for v in variables) for variables in both)


def _resized(tree: PyTree, n: int) -> PyTree:
    """The shapes and dtypes of a tree of arrays, with `n` rows; scalars have none."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]) if x.shape else (), x.dtype), tree
    )


class _Needed(NamedTuple):
    """An equation of a jaxpr that the results depend on."""

    equation: JaxprEqn
    results: list[Var]
    """Those that are needed."""
    makers: _Makers
    """The equations of the same program by what they result in, and the values of constants."""


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
