"""Whether outputs of a model depend on other rows of the batch, judged by its jaxpr."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from flaxfit.data._batch import Batch, has_rows, n_examples
from flaxfit.step._jaxpr import parts_of
from flaxfit.tree._shapes import shapes_of
from flaxfit.tree._single_replica import unbound_axis
from flaxfit.tree._types import Function, PyTree

_ALONG = {
    "cumsum": "axis",
    "cumprod": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumlogsumexp": "axis",
    "top_k": "axis",
}
"""Primitives that combine the elements along an axis, and the parameter that names it."""
_MOST_ROUNDS = 4
"""The rounds in which what a loop carries settles."""


class _Rows(NamedTuple):
    """Where an array has the rows of the batch, as far as that is known."""

    axis: int | None = None
    """The axis of rows, which may hold several elements of each; None: none, or not known."""
    mixed: bool = False
    """Whether elements were made of several rows."""


_NONE = _Rows()


def mixes_rows(
    program: Jaxpr, arguments: tuple[PyTree, ...], results: PyTree, outputs: PyTree
) -> bool:
    """Whether an output of a model combines rows of the inputs, axis by axis.

    It follows the axis of rows from the inputs on, and finds reductions, products and sums along
    it, and arrays that pair rows. An axis that it loses track of counts as harmless, so that no
    model is blamed for nothing. An output without rows, such as a penalty, does not count.

    Args:
      program: the closed jaxpr of a function of `arguments`, of which one is a `Batch`.
      arguments: what it was traced with.
      results: what it returns, or the shapes.
      outputs: the part of `results` that is examined, the same objects.
    """
    batch = next(each for each in arguments if isinstance(each, Batch))
    if not has_rows(batch):
        return False
    rows = {id(leaf) for leaf in jax.tree.leaves(batch.inputs) if leaf.ndim}
    wanted = {id(leaf) for leaf in jax.tree.leaves(outputs)}
    given = [_Rows(0) if id(leaf) in rows else _NONE for leaf in jax.tree.leaves(arguments)]
    n = {leaf.shape[0] for leaf in jax.tree.leaves(batch.inputs) if leaf.ndim}
    return any(
        each.mixed and id(leaf) in wanted and leaf.ndim and leaf.shape[0] in n
        for each, leaf in zip(_through(program, given), jax.tree.leaves(results), strict=True)
    )


def mixes_values(
    function: Function, arguments: tuple[PyTree, ...], outputs_of: Function, outputs: PyTree
) -> bool:
    """As `mixes_rows`, by trial, where nothing is traced.

    An output mixes rows if it changes where only the last row of the inputs is another one. The
    shapes stay, and with them what is drawn at random.
    """
    batch = next(each for each in arguments if isinstance(each, Batch))
    if not has_rows(batch):
        return False

    def replaced(x: PyTree) -> PyTree:
        return jnp.asarray(x).at[-1].set(x[0]) if jnp.ndim(x) else x

    other = batch._replace(inputs=jax.tree.map(replaced, batch.inputs))
    changed = outputs_of(function(*(other if each is batch else each for each in arguments)))
    n = n_examples(batch)
    pairs = zip(jax.tree.leaves(outputs), jax.tree.leaves(changed), strict=True)
    return any(
        not np.allclose(one[:-1], two[:-1], 1e-3, 1e-6, equal_nan=True)
        for one, two in (map(np.asarray, pair) for pair in pairs)
        if one.shape[:1] == (n,) and np.issubdtype(one.dtype, np.number)
    )


def names_axis(function: Function, *arguments: PyTree) -> bool:
    """Whether a function names the axis of replicas, as `lax.pmean` does: it sees all rows then."""
    try:
        jax.eval_shape(function, *map(shapes_of, arguments))
    except NameError as error:
        return unbound_axis(error) is not None
    return False


def _through(program: Any, given: Sequence[_Rows]) -> list[_Rows]:
    """The rows in the results of a jaxpr, from those in its arguments."""
    program = getattr(program, "jaxpr", program)
    known: dict[Var, _Rows] = dict(zip(program.invars, given, strict=True))

    def of(variable: Any) -> _Rows:
        return _NONE if isinstance(variable, Literal) else known.get(variable, _NONE)

    for equation in program.eqns:
        operands = [of(v) for v in equation.invars]
        if any(each != _NONE for each in operands):
            known.update(zip(equation.outvars, _results(equation, operands), strict=True))
    return [of(v) for v in program.outvars]


def _results(equation: JaxprEqn, operands: list[_Rows]) -> list[_Rows]:
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return _scanned(equation, operands)
    if name == "while":
        n_consts = params["cond_nconsts"]
        return _carried(params["body_jaxpr"], operands[n_consts:], params["body_nconsts"])
    if name == "cond":
        branches = [_through(each, operands[1:]) for each in params["branches"]]
        return [_either(each) for each in zip(*branches, strict=True)]
    # What reduces holds a program for two numbers.
    parts = [] if name.startswith(("reduce", "scatter")) else parts_of(equation)
    if len(parts) == 1 and len(getattr(parts[0], "jaxpr", parts[0]).invars) == len(operands):
        return _through(parts[0], operands)
    mixed = any(each.mixed for each in operands)
    found = [_moved(equation, operands, _shape(v)) for v in equation.outvars]
    return [each._replace(mixed=each.mixed or mixed) for each in found]


def _moved(equation: JaxprEqn, operands: list[_Rows], shape: tuple[int, ...]) -> _Rows:
    """The rows in a result of a primitive that holds no program."""
    name, params = equation.primitive.name, equation.params
    shapes, (first, *_) = [_shape(v) for v in equation.invars], operands
    axis = first.axis
    if name == "dot_general":
        return _multiplied(params["dimension_numbers"], shapes, operands)
    if name == "gather":
        return _gathered(params["dimension_numbers"], params["slice_sizes"], shapes, operands)
    if name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        is_batch = axis is not None and axis == numbers.lhs_spec[0]
        return _Rows(numbers.out_spec[0]) if is_batch else _NONE
    if name.startswith("scatter"):
        return _Rows(axis)
    if name == "concatenate":
        # Rows beside others, such as views of them, are no longer told apart.
        return _either([each for each in operands if each.axis != params["dimension"]])
    if axis is not None:
        if shapes[0][axis] == 1:
            return _NONE  # A single row is combined with no other.
        if name == "broadcast_in_dim":
            return _Rows(params["broadcast_dimensions"][axis])
        if name == "transpose":
            return _Rows(params["permutation"].index(axis))
        if name == "squeeze":
            removed = [dimension % len(shapes[0]) for dimension in params["dimensions"]]
            return _without(axis, removed)
        if name == "reshape":
            return _reshaped(axis, shapes[0], shape)
        if name == "reduce" or "axes" in params and name.startswith(("reduce_", "arg")):
            removed = params["dimensions" if name == "reduce" else "axes"]
            return _Rows(mixed=True) if axis in removed else _without(axis, removed)
        if name == "sort" and params["dimension"] == axis:
            return _NONE  # It may be undone.
        if name in _ALONG and params.get(_ALONG[name], len(shapes[0]) - 1) == axis:
            return _Rows(axis, mixed=True)
        if name in ("rev", "slice", "dynamic_slice", "pad"):
            return _Rows(axis) if shape[axis] == shapes[0][axis] else _NONE
    # Anything else whose operands fit its result is taken to work element by element.
    return _joined([each for each, old in zip(operands, shapes, strict=True) if _fits(old, shape)])


def _joined(several: Sequence[_Rows]) -> _Rows:
    """The rows of arrays that are combined element by element."""
    axes = {each.axis for each in several if each.axis is not None}
    mixed = any(each.mixed for each in several)
    if len(axes) > 1:
        return _Rows(min(axes), mixed=True)  # Each row meets each other one.
    return _Rows(axes.pop() if axes else None, mixed)


def _either(several: Sequence[_Rows]) -> _Rows:
    """The rows of an array that is one of several."""
    axes = {each.axis for each in several if each.axis is not None}
    return _Rows(axes.pop() if len(axes) == 1 else None, any(each.mixed for each in several))


def _fits(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Whether an array is broadcast against another shape, along axes of size 1."""
    return len(old) == len(new) and all(a in (1, b) for a, b in zip(old, new, strict=True))


def _without(axis: int, removed: Sequence[int]) -> _Rows:
    return _NONE if axis in removed else _Rows(axis - sum(each < axis for each in removed))


def _reshaped(axis: int, old: tuple[int, ...], new: tuple[int, ...]) -> _Rows:
    """Finds the axis that begins where that of the rows began: it runs over rows, too."""
    before = math.prod(old[:axis])
    places = (i for i, size in enumerate(new) if size > 1 and math.prod(new[:i]) == before)
    place = next(places, None)
    return _NONE if place is None else _Rows(place)


def _multiplied(numbers: Any, shapes: list[tuple[int, ...]], operands: list[_Rows]) -> _Rows:
    contracted, batched = numbers
    n_batched, found = len(batched[0]), []
    before = n_batched
    for shape, rows, along, beside in zip(shapes, operands, contracted, batched, strict=True):
        free = [axis for axis in range(len(shape)) if axis not in (*along, *beside)]
        if rows.axis is not None and rows.axis in along and shape[rows.axis] > 1:
            return _Rows(mixed=True)
        if rows.axis in beside:
            found.append(_Rows(list(beside).index(rows.axis)))
        elif rows.axis in free:
            found.append(_Rows(before + free.index(rows.axis)))
        before += len(free)
    return _joined(found)


def _gathered(
    numbers: Any, sizes: Sequence[int], shapes: list[tuple[int, ...]], operands: list[_Rows]
) -> _Rows:
    """The rows of what is read by index: those of the indices, or of an array read along others."""
    array, indices = operands
    n_axes = len(shapes[1]) - 1 + len(numbers.offset_dims)
    if indices.axis is not None and indices.axis < len(shapes[1]) - 1:
        places = [axis for axis in range(n_axes) if axis not in numbers.offset_dims]
        return _Rows(places[indices.axis])
    if array.axis is None or sizes[array.axis] != shapes[0][array.axis]:
        return _NONE
    gone = (*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ()))
    kept = [axis for axis in range(len(shapes[0])) if axis not in gone]
    return _Rows(numbers.offset_dims[kept.index(array.axis)]) if array.axis in kept else _NONE


def _scanned(equation: JaxprEqn, operands: list[_Rows]) -> list[_Rows]:
    body = equation.params["jaxpr"]
    # What is scanned over, and what is stacked, has an axis more outside than in the body. The
    # parameters that say so differ between versions of JAX.
    n_over = _n_longer(equation.invars, body.jaxpr.invars)
    n_stacked = _n_longer(equation.outvars, body.jaxpr.outvars)
    n_before, n_carry = len(operands) - n_over, len(equation.outvars) - n_stacked
    # A scan over the rows is harmless: `lax.map` is one.
    slices = [_NONE if each.axis == 0 else _shifted(each, -1) for each in operands[n_before:]]
    found = _carried(body, [*operands[:n_before], *slices], n_before - n_carry, n_carry)
    return found[:n_carry] + [_shifted(each, 1) for each in found[n_carry:]]


def _n_longer(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(len(_shape(a)) > len(_shape(b)) for a, b in zip(outside, inside, strict=True))


def _shifted(rows: _Rows, by: int) -> _Rows:
    return rows if rows.axis is None else rows._replace(axis=rows.axis + by)


def _carried(
    body: Any, operands: Sequence[_Rows], n_consts: int, n_carry: int | None = None
) -> list[_Rows]:
    """The results of a loop, of which the carry settles in a few rounds."""
    n_carry = len(operands) - n_consts if n_carry is None else n_carry
    consts, rest = list(operands[:n_consts]), list(operands[n_consts + n_carry :])
    carry, found = list(operands[n_consts : n_consts + n_carry]), []
    for _ in range(_MOST_ROUNDS):
        found = _through(body, [*consts, *carry, *rest])
        settled = [_either(each) for each in zip(carry, found[:n_carry], strict=True)]
        if settled == carry:
            break
        carry = settled
    return [*carry, *found[n_carry:]]


def _shape(variable: Any) -> tuple[int, ...]:
    return getattr(variable.aval, "shape", ())
