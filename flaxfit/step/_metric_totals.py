"""Totals: sums over many steps in twice their precision, and the metrics computed from them."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.task import check_counts, is_loss_of_output
from flaxfit.tree import Array, ArrayLike, PyTree, Sums

Totals: TypeAlias = dict[str, Array]
"""By dtype, an array `(2, n)`: the sums of that dtype, and their accumulated rounding errors."""


def zero_totals(sums: PyTree) -> Totals:
    """Makes totals of zeros on the host, for sums of these shapes and dtypes."""
    sizes: dict[str, int] = {}
    for leaf in jax.tree.leaves(sums):
        sizes[str(leaf.dtype)] = sizes.get(str(leaf.dtype), 0) + leaf.size
    return {dtype: np.zeros((2, size), dtype) for dtype, size in sizes.items()}


def add(totals: Totals, sums: PyTree) -> Totals:
    """Adds sums to totals in about twice the precision of their dtype.

    A plain float32 total stops growing at 2**24 examples. Knuth's two-sum keeps the rounding error
    of each addition (D. Knuth, The Art of Computer Programming 2, 4.2.2).
    """
    vectors = pack(sums)
    return {d: jnp.stack(_two_sum(totals[d][0], totals[d][1], x)) for d, x in vectors.items()}


def reader(like: PyTree) -> Callable[[Totals], PyTree]:
    """Makes `totals -> sums`, with the structure of `like`.

    The sums are float64 (or integer) arrays on the host. Reading waits for the device.
    """
    unpack, leaves = unpacker(like), jax.tree.leaves(like)
    floats = {str(x.dtype) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)}

    def whole(dtype: str, high: np.ndarray, low: np.ndarray) -> np.ndarray:
        return np.add(high, low, dtype=np.float64) if dtype in floats else high

    def read(totals: Totals) -> PyTree:
        # Not `jax.device_get`: its asynchronous copy takes longer than reading a few numbers.
        return unpack({dtype: whole(dtype, *np.asarray(x)) for dtype, x in totals.items()})

    return read


def compute(
    sums: Mapping[str, Sums], metrics: Mapping[str, Any], where: str = ""
) -> dict[str, PyTree]:
    """Computes metrics from their sums, on the host; scalars become floats.

    The value of other sums is `sum / weight` for a pair `(sum, weight)`, `count` for `(count,)`,
    and the sum of the means for a mapping of pairs, such as losses by output. Without any weight,
    the loss is 0, as in training, and metrics are nan. `where` is a part of the error message.

    Raises:
      ValueError: there were labels out of range.
    """
    values, sums = {}, check_counts(sums, where)
    # If all steps were skipped, the loss is unknown.
    of_nothing = np.nan if sums.get("skipped_steps", (0,))[0] else 0.0
    order = [name for name in ("loss", *metrics) if name in sums]
    for name in dict.fromkeys([*order, *sums]):
        parts = sums[name]
        if name in metrics:
            is_loss = is_loss_of_output(metrics[name])
            is_empty = is_loss and not parts["weight"]
            value = of_nothing if is_empty else metrics[name].compute(parts)
        elif isinstance(parts, Mapping):
            means = [total / weight for total, weight in parts.values() if weight]
            value = np.float64(sum(means) if means else of_nothing)
        elif len(parts) == 1:
            value = np.float64(parts[0])
        elif name == "loss" and not (parts[0] or parts[1]):
            value = of_nothing
        else:
            value = _mean(*parts)
        if type(value) is not float:
            value = np.asarray(value)
            value = float(value) if value.ndim == 0 else value
        values[name] = value
    return values


def pack(tree: PyTree) -> dict[str, jax.Array]:
    """Concatenates the leaves of a tree into one vector per dtype: fewer, larger operations."""
    leaves: dict[str, list[jax.Array]] = {}
    for leaf in jax.tree.leaves(tree):
        leaves.setdefault(str(leaf.dtype), []).append(jnp.ravel(leaf))
    return {dtype: jnp.concatenate(parts) for dtype, parts in leaves.items()}


def unpacker(like: PyTree) -> Callable[[Mapping[str, Array]], PyTree]:
    """Makes the inverse of `pack`, for trees with the structure and shapes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    ends: dict[str, int] = {}
    places = []
    for leaf in leaves:
        dtype = str(leaf.dtype)
        start = ends.get(dtype, 0)
        ends[dtype] = end = start + leaf.size
        places.append((dtype, slice(start, end), leaf.shape))
    return lambda vectors: structure.unflatten(
        [vectors[dtype][place].reshape(shape) for dtype, place, shape in places]
    )


def _two_sum(high: jax.Array, low: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    total = high + x
    if not jnp.issubdtype(total.dtype, jnp.inexact):
        return total, low
    # Rounded like any float operation, but total + error = high + x holds exactly.
    part = total - high
    error = (high - (total - part)) + (x - part)
    # After an overflow the error would be inf - inf = nan, and spoil the sum.
    return total, low + jnp.where(jnp.isfinite(total), error, 0)


def _mean(total: ArrayLike, weight: ArrayLike) -> ArrayLike:
    if np.ndim(total) == np.ndim(weight) == 0 and weight:  # A shortcut: `errstate` is slow.
        return float(total) / float(weight)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.float64(total) / np.float64(weight)
