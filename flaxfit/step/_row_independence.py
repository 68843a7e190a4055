"""Proves that a program computes the rows of a batch independently, from jaxprs of two sizes.

The proof is an abstract interpretation: each array gets a `Kind`, by one rule per primitive. It is
sound because a rule answers only for a primitive and parameters that it knows; the rest is
unproven. It is not complete: an unproven program is tried on data instead, which compiles the pass
for several sizes and lengthens a first step by a third or more.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax.extend.core import Literal

from flaxfit.step._jaxpr import parts_of, with_derivatives

Shape: TypeAlias = tuple[int, ...]


class Kind(NamedTuple):
    """How an array depends on the rows of the batch."""

    axis: int | None = None
    """The axis of rows: slice i depends on row i alone, not on i or on the number of rows."""


FREE = Kind()
"""The kind of an array that depends neither on the rows nor on their number."""
Known: TypeAlias = Kind | None
"""None: unproven."""

_NAMES = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil "
    "clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv "
    "erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt "
    "max min mul name ne neg nextafter not or population_count pow real reduce_precision rem "
    "round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh "
    "sqrt square stop_gradient sub tan tanh xor"
)
_ELEMENTWISE = frozenset(_NAMES.split())
_COMPARISONS = {"clamp", "eq", "ge", "gt", "le", "lt", "max", "min", "ne"}
_REDUCTIONS = {f"reduce_{kind}" for kind in ("and", "max", "min", "or", "prod", "sum", "xor")}
_REDUCTIONS |= {"argmax", "argmin"}
# Primitives that combine elements along an axis, and the parameter that names it.
_ALONG = {name: "axis" for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")}
_ALONG |= {"sort": "dimension", "rev": "dimensions", "split": "axis", "concatenate": "dimension"}
_CALLS = {"jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call"}
_CONVOLUTION = (
    *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
    *("feature_group_count", "batch_group_count"),
)


class OtherProgram(Exception):
    """Raised if the programs for two numbers of rows differ in more than sizes."""


def kinds_of_results(
    one: Any, two: Any, given: Sequence[Known], n: int, factor: int, *, is_rule: bool = False
) -> list[Known]:
    """Proves how the results of a program depend on rows.

    In one trace, a dimension of n is indistinguishable from a constant n. Two traces differ
    exactly in the numbers that depend on the number of rows.

    Args:
      one: the closed jaxpr for `n` rows.
      two: the closed jaxpr for `factor * n` rows.
      given: the kinds of the arguments.
      n: the number of rows in the first.
      factor: the ratio of the numbers of rows.
      is_rule: whether the programs are rules of derivatives, whose own derivatives are not needed.

    Returns:
      The kinds of the results; None for those of unknown primitives.

    Raises:
      OtherProgram: the programs differ in more than sizes.
    """
    a, b = getattr(one, "jaxpr", one), getattr(two, "jaxpr", two)
    if (len(a.constvars), len(a.outvars)) != (len(b.constvars), len(b.outvars)):
        raise OtherProgram
    # Keyed by the variable of the second program: several may repeat one variable of the first.
    twins: dict[Any, Any] = dict(zip(b.invars + b.constvars, a.invars + a.constvars, strict=True))
    known: dict[Any, Known] = dict(zip(b.invars, given, strict=True))
    constants = zip(getattr(one, "consts", ()), getattr(two, "consts", ()), strict=False)
    for variable, (c, d) in zip(b.constvars, constants, strict=False):
        known[variable] = FREE if _same(c, d) else None
        if known[variable] is None and np.shape(c) == np.shape(d):  # Another table.
            raise OtherProgram

    def of(x: Any, y: Any, name: str = "") -> Known:
        if isinstance(x, Literal) or isinstance(y, Literal):
            if isinstance(x, Literal) and isinstance(y, Literal) and _same(x.val, y.val):
                return FREE
            # The number of elements, by which a mean divides, is merely unproven. Any other number
            # that differs makes another program: a capacity, or a factor for large batches.
            both = isinstance(x, Literal) and isinstance(y, Literal)
            if name in _COMPARISONS or not (both and _counts_rows(x.val, y.val, n, factor)):
                raise OtherProgram
            return None
        if twins[y] is not x:  # The operand comes from another equation: other data flow.
            raise OtherProgram
        return known.get(y)

    firsts = deque(a.eqns)
    for y in b.eqns:
        if n == 1 and (axis := _repeated(y, known, factor)) is not None:
            twin, first = twins[y.invars[0]], firsts[0] if firsts else y
            # Unless the first program has this broadcast, too.
            if first.primitive is not y.primitive or first.invars[0] is not twin:
                twins[y.outvars[0]], known[y.outvars[0]] = twin, Kind(axis)
                continue
        x = firsts.popleft() if firsts else None
        if x is None or x.primitive is not y.primitive or _sizes(x) != _sizes(y):
            raise OtherProgram
        twins.update(zip(y.outvars, x.outvars, strict=True))
        name = x.primitive.name
        operands = [of(*pair, name) for pair in zip(x.invars, y.invars, strict=True)]
        found = [None] * len(x.outvars)
        if None not in operands:
            found = _results(_Pair(x, y, operands, n, factor, is_rule))
        for variable, kind, shapes in zip(y.outvars, found, _shapes(x, y), strict=True):
            if (axes := _differing(*shapes, factor)) is None:
                raise OtherProgram
            # The axis that a rule claims must be the one axis whose size differs.
            claimed = [] if kind is None or kind.axis is None else [kind.axis]
            known[variable] = kind if axes == claimed else None
    if firsts:
        raise OtherProgram
    return [of(*pair) for pair in zip(a.outvars, b.outvars, strict=True)]


def _sizes(equation: Any) -> tuple[int, int]:
    return len(equation.invars), len(equation.outvars)


def _repeated(equation: Any, known: Mapping[Any, Known], factor: int) -> int | None:
    """Returns the axis along which an equation only repeats an array `factor` times; else None.

    JAX leaves such an equation out of the program for one row.
    """
    if equation.primitive.name != "broadcast_in_dim":
        return None
    given, new = equation.invars[0], _shape(equation.outvars[0])
    is_free = not isinstance(given, Literal) and known.get(given) == FREE
    if not is_free or equation.params["broadcast_dimensions"] != (*range(len(new)),):
        return None
    axes = _differing(_shape(given), new, factor)
    return axes[0] if axes and len(axes) == 1 else None


class _Pair(NamedTuple):
    """One equation in both programs, with the kinds of its operands."""

    one: Any
    two: Any
    operands: list[Any]
    n: int
    """The number of rows in the first program."""
    factor: int
    is_rule: bool

    @property
    def name(self) -> str:
        return self.one.primitive.name

    @property
    def axes(self) -> set[int]:
        """The row axes of the operands."""
        return {each.axis for each in self.operands if each.axis is not None}

    @property
    def rows(self) -> Known:
        """The kind of a result that keeps the rows of an operand, at the axis that differs."""
        return None if self.axis is None else Kind(self.axis)

    @property
    def axis(self) -> int | None:
        """The row axis of the first result; None if not exactly one axis differs."""
        axes = _differing(*next(iter(_shapes(self.one, self.two))), self.factor)
        return axes[0] if axes and len(axes) == 1 else None

    def agree(self, *names: str) -> bool:
        """Returns whether both equations have equal parameters of these names, or of all names."""
        one, two = self.one.params, self.two.params
        return all(_same(one.get(name), two.get(name)) for name in names or one)

    def all(self, kind: Known) -> list[Known]:
        return [kind] * len(self.one.outvars)

    def kinds(self, programs: Sequence[Any], given: Sequence[Known]) -> list[Known]:
        """Returns the kinds of the results of inner programs."""
        return kinds_of_results(
            programs[0], programs[1], given, self.n, self.factor, is_rule=self.is_rule
        )


def _results(pair: _Pair) -> list[Known]:
    name, operands = pair.name, pair.operands
    if name == "scan":
        return _scanned(pair)
    if name in _CALLS:
        one, two = (parts_of(each) for each in (pair.one, pair.two))
        if len(one) == len(two) == 1 and len(_invars(one[0])) == len(operands):
            found = pair.kinds([one[0], two[0]], operands)
            is_kept = name != "custom_jvp_call" or pair.is_rule or _keeps_derivatives(pair, found)
            return found if is_kept else pair.all(None)
        return pair.all(None)
    is_one_size = all(one == two for one, two in _shapes(pair.one, pair.two))
    if is_one_size and all(each == FREE for each in operands):
        return pair.all(FREE if pair.agree() else None)
    if name == "random_bits":  # Independent rows, although another size draws other numbers.
        return pair.all(pair.rows if operands == [FREE] else None)
    if len(pair.axes) > 1 and name not in ("dot_general", "gather"):
        return pair.all(None)
    if name in _ELEMENTWISE:
        if not pair.agree():
            raise OtherProgram
        return pair.all(pair.rows)
    if name in _REDUCTIONS:  # A reduction over the row axis mixes rows.
        is_gone = bool(pair.axes & {*pair.one.params["axes"]})
        return pair.all(pair.rows if pair.agree() and not is_gone else None)
    if name in _ALONG:
        along = pair.one.params[_ALONG[name]]
        is_along = pair.axes & {*along} if isinstance(along, tuple) else along in pair.axes
        return pair.all(pair.rows if pair.agree() and not is_along else None)
    rule, axis = _RULES.get(name), pair.axis
    keeps_rows = rule is not None and axis is not None and rule(pair, axis)
    return pair.all(Kind(axis) if keeps_rows else None)


def _keeps_derivatives(pair: _Pair, found: list[Known]) -> bool:
    """Returns whether a custom rule keeps the kinds of results for their derivatives."""
    if pair.one.params["symbolic_zeros"]:  # Another rule may hold where a direction is zero.
        return False
    is_variable = [not isinstance(each, Literal) for each in pair.one.invars]
    given = [*itertools.compress(pair.operands, is_variable)] * 2
    try:
        rules = [with_derivatives(each) for each in (pair.one, pair.two)]
    except Exception:  # It has none, such as for integers.
        return False
    return pair._replace(is_rule=True).kinds(rules, given) == found * 2


def _broadcast(pair: _Pair, axis: int) -> bool:
    (kind, *_), to = pair.operands, pair.one.params["broadcast_dimensions"]
    keeps_rows = kind == FREE or to[kind.axis] == axis
    return keeps_rows and pair.agree("broadcast_dimensions")


def _reshaped(pair: _Pair, axis: int) -> bool:
    """Returns whether rows keep their order: equal sizes before the axis, whole rows along it."""
    old, new = _shape(pair.one.invars[0]), _shape(pair.one.outvars[0])
    (kind, *_) = pair.operands
    if kind.axis is None or pair.one.params.get("dimensions") is not None:
        return False
    # Splitting or merging axes is allowed as long as rows stay the outermost part of their axis.
    return math.prod(old[: kind.axis]) == math.prod(new[:axis]) and new[axis] % pair.n == 0


def _multiplied(pair: _Pair, axis: int) -> bool:
    names = "dimension_numbers", "precision", "preferred_element_type"
    (contracted, batched) = pair.one.params["dimension_numbers"]
    if not pair.agree(*names):
        return False
    before = len(batched[0])
    is_batched = [kind.axis in beside for kind, beside in zip(pair.operands, batched, strict=True)]
    if any(is_batched):
        return all(is_batched) and {
            beside.index(kind.axis) for kind, beside in zip(pair.operands, batched, strict=True)
        } == {axis}
    # With rows in both operands, the product has two axes of rows: all pairs of rows.
    if sum(kind.axis is not None for kind in pair.operands) != 1:
        return False
    return axis >= before and all(
        kind.axis not in along for kind, along in zip(pair.operands, contracted, strict=True)
    )


def _convolved(pair: _Pair, axis: int) -> bool:
    numbers, (images, kernel) = pair.one.params["dimension_numbers"], pair.operands
    # Batch groups would combine images; each kernel must see all of an image and no other.
    is_alone = pair.one.params["batch_group_count"] == 1
    is_batch = images.axis == numbers.lhs_spec[0] and axis == numbers.out_spec[0]
    return kernel == FREE and is_batch and is_alone and pair.agree(*_CONVOLUTION)


def _pooled(pair: _Pair, axis: int) -> bool:
    names = "window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation"
    (kind, *_), params = pair.operands, pair.one.params
    if kind.axis is None or not pair.agree(*names):
        return False
    # Along the row axis, the window must have size 1, without strides, dilation or padding.
    sizes = [params[name][kind.axis] for name in names if name != "padding"]
    return sizes == [1] * 4 and tuple(params["padding"][kind.axis]) == (0, 0)


def _sliced(pair: _Pair, axis: int) -> bool:
    """Returns whether a slice keeps the whole row axis, and its other bounds agree."""
    one, two = (each.params for each in (pair.one, pair.two))
    if axis != pair.operands[0].axis:
        return False
    strides = one["strides"] or (1,) * len(one["start_indices"])
    return (
        one["start_indices"] == two["start_indices"]
        and one["strides"] == two["strides"]
        and (one["start_indices"][axis], strides[axis]) == (0, 1)
        and one["limit_indices"][axis] == _shape(pair.one.invars[0])[axis]
        and two["limit_indices"][axis] == _shape(pair.two.invars[0])[axis]
    )


def _windowed(pair: _Pair, axis: int) -> bool:
    """Returns whether a dynamic slice keeps the whole row axis."""
    kind, *starts = pair.operands
    both = pair.one, pair.two
    is_whole = [_shape(each.invars[0])[axis] == _shape(each.outvars[0])[axis] for each in both]
    return kind.axis == axis and all(is_whole) and all(each == FREE for each in starts)


def _gathered(pair: _Pair, axis: int) -> bool:
    """Returns whether rows index a table or each itself by its own indices, or all by the same."""
    numbers, (array, indices) = pair.one.params["dimension_numbers"], pair.operands
    names = "dimension_numbers", "mode", "fill_value", "indices_are_sorted", "unique_indices"
    sizes = [each.params["slice_sizes"] for each in (pair.one, pair.two)]
    if array == indices == FREE or not pair.agree(*names):
        return False
    if indices.axis is None:
        shapes = [_shape(each.invars[0]) for each in (pair.one, pair.two)]
        others = [each[: array.axis] + each[array.axis + 1 :] for each in sizes]
        is_whole = [a[array.axis] == b[array.axis] for a, b in zip(sizes, shapes, strict=True)]
        return all(is_whole) and others[0] == others[1]
    last = len(_shape(pair.one.invars[1])) - 1
    n_axes = len(_shape(pair.one.outvars[0]))
    places = [axis for axis in range(n_axes) if axis not in numbers.offset_dims]
    is_along = indices.axis < last and places[indices.axis] == axis and sizes[0] == sizes[1]
    if array.axis is None:
        return is_along
    beside = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    return is_along and beside.get(array.axis) == indices.axis


_RULES: dict[str, Callable[[_Pair, int], bool]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "squeeze": lambda pair, axis: pair.agree(),
    "transpose": lambda pair, axis: (
        pair.agree() and pair.one.params["permutation"][axis] == pair.operands[0].axis
    ),
    "dot_general": _multiplied,
    "conv_general_dilated": _convolved,
    "reduce_window_max": _pooled,
    "reduce_window_min": _pooled,
    "reduce_window_sum": _pooled,
    "slice": _sliced,
    "dynamic_slice": _windowed,
    "gather": _gathered,
    # It counts along another axis than that of the rows.
    "iota": lambda pair, axis: (
        pair.agree("dimension", "dtype") and pair.one.params["dimension"] != axis
    ),
}


def _scanned(pair: _Pair) -> list[Known]:
    """Returns the kinds of a scan over another axis, if the carry keeps its kinds."""
    bodies = [each.params["jaxpr"] for each in (pair.one, pair.two)]
    if not pair.agree("length", "reverse"):
        return pair.all(None)
    # Scanned inputs and stacked outputs have one axis more than in the body. They are recognized by
    # this, since the parameters that count them differ between versions of JAX.
    n_over = _n_longer(pair.one.invars, _invars(bodies[0]))
    n_stacked = _n_longer(pair.one.outvars, bodies[0].jaxpr.outvars)
    n_before, n_carry = len(pair.operands) - n_over, len(pair.one.outvars) - n_stacked
    over = [_shifted(each, -1) for each in pair.operands[n_before:]]
    given = [*pair.operands[:n_before], *over]
    found = pair.kinds(bodies, given)
    carry = pair.operands[n_before - n_carry : n_before]
    # Induction over the iterations: the carry must leave the body as it entered.
    if None in given or found[:n_carry] != carry:
        return pair.all(None)
    return [*carry, *(_shifted(each, 1) for each in found[n_carry:])]


def _n_longer(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(len(_shape(a)) > len(_shape(b)) for a, b in zip(outside, inside, strict=True))


def _shifted(kind: Known, by: int) -> Known:
    """Returns the kind without (-1) or with (1) a first axis; None if rows were the first axis."""
    if kind is None or kind.axis is None:
        return kind
    return None if kind.axis + by < 0 else kind._replace(axis=kind.axis + by)


def _counts_rows(one: Any, two: Any, n: int, factor: int) -> bool:
    """Returns whether two float constants are k * n and k * factor * n, or their inverses."""
    is_float = np.issubdtype(np.result_type(one), np.floating)
    if not is_float or not np.isfinite([one, two]).all() or 0 in (one, two):
        return False
    for a, b in ((float(one), float(two)), (1 / float(one), 1 / float(two))):
        n_of_each = round(a / n)
        if n_of_each and np.allclose((a, b), (n_of_each * n, n_of_each * factor * n), 1e-5):
            return True
    return False


def _invars(program: Any) -> list[Any]:
    return getattr(program, "jaxpr", program).invars


def _shapes(one: Any, two: Any) -> list[tuple[Shape, Shape]]:
    return [(_shape(a), _shape(b)) for a, b in zip(one.outvars, two.outvars, strict=True)]


def _shape(variable: Any) -> Shape:
    return getattr(variable.aval, "shape", ())


def _differing(one: Shape, two: Shape, factor: int) -> list[int] | None:
    """Returns the axes whose sizes differ; None if a size differs by another factor."""
    pairs = list(zip(one, two, strict=False))
    if len(one) != len(two) or any(b not in (a, factor * a) for a, b in pairs):
        return None
    return [axis for axis, (a, b) in enumerate(pairs) if a != b]


def _same(one: Any, two: Any) -> bool:
    """Returns whether two constants or parameters are equal; False if they cannot be compared."""
    if one is two:
        return True
    if hasattr(one, "dtype"):
        try:
            a, b = np.asarray(one), np.asarray(two)
            return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        except Exception:  # Typed random keys have no NumPy values.
            return False
    return bool(type(one) is type(two) and one == two)
