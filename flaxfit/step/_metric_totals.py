"""Totals: sums over many steps, added up on the device without losing the small ones."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.tree._types import PyTree

Totals = dict[str, Any]
"""By dtype, an array `(2, n)`: all sums of it, and for each the part that rounding has cut off."""


def zero_totals(sums: PyTree) -> Totals:
    """Empty totals on the host, for sums of these shapes and dtypes.

    >>> zero_totals({"loss": np.float32(1), "n": np.float32(2)})["float32"].shape
    (2, 2)
    """
    sizes: dict[str, int] = {}
    for leaf in jax.tree.leaves(sums):
        sizes[str(leaf.dtype)] = sizes.get(str(leaf.dtype), 0) + leaf.size
    return {dtype: np.zeros((2, size), dtype) for dtype, size in sizes.items()}


def add(totals: Totals, sums: PyTree) -> Totals:
    """Adds sums to totals, exactly to about twice the precision of their dtype.

    A plain float32 total stops growing at 2**24 examples. This is Knuth's two-sum: the rounding
    error of each addition is kept (D. Knuth, The Art of Computer Programming 2, 4.2.2).
    """
    vectors = pack(sums)
    return {d: jnp.stack(_two_sum(totals[d][0], totals[d][1], x)) for d, x in vectors.items()}


def reader(like: PyTree) -> Callable[[Totals], Any]:
    """Makes the function that reads totals: `totals -> sums`, in the structure of `like`.

    The sums are float64 (or integer) arrays on the host. Reading waits for the device.

    >>> reader({"n": np.float32(1)})({"float32": np.array([[3], [0.5]], np.float32)})
    {'n': array(3.5)}
    """
    structure, places = _layout(like)

    def read(totals: Totals) -> Any:
        # `jax.device_get` would begin a copy in the background, which takes longer than a few
        # numbers.
        sums = {dtype: _whole(*np.asarray(x)) for dtype, x in totals.items()}
        return structure.unflatten([sums[d][place].reshape(shape) for d, place, shape in places])

    return read


def pack(tree: PyTree) -> dict[str, jax.Array]:
    """The leaves of a tree as one vector for each dtype: one operation then serves all.

    >>> pack((jnp.ones(2), jnp.int32(3)))["int32"]
    Array([3], dtype=int32)
    """
    leaves: dict[str, list[Any]] = {}
    for leaf in jax.tree.leaves(tree):
        leaves.setdefault(str(leaf.dtype), []).append(jnp.ravel(leaf))
    return {dtype: jnp.concatenate(parts) for dtype, parts in leaves.items()}


def unpack(vectors: dict[str, Any], like: PyTree) -> Any:
    """The tree whose leaves were packed; `like` tells its structure, shapes and dtypes."""
    structure, places = _layout(like)
    return structure.unflatten([vectors[d][place].reshape(shape) for d, place, shape in places])


def _layout(like: PyTree) -> tuple[Any, list[tuple[str, slice, tuple[int, ...]]]]:
    """The structure of a tree that was packed; and of each leaf its vector, place and shape."""
    leaves, structure = jax.tree.flatten(like)
    ends: dict[str, int] = {}
    places = []
    for leaf in leaves:
        dtype = str(leaf.dtype)
        start = ends.get(dtype, 0)
        ends[dtype] = end = start + leaf.size
        places.append((dtype, slice(start, end), leaf.shape))
    return structure, places


def _two_sum(high: jax.Array, low: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    total = high + x
    if not jnp.issubdtype(total.dtype, jnp.inexact):
        return total, low
    part = total - high
    error = (high - (total - part)) + (x - part)
    # Sums that have overflowed have no error worth keeping (inf - inf is nan).
    return total, low + jnp.where(jnp.isfinite(total), error, 0)


@functools.cache
def _is_floating(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _whole(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    if not _is_floating(high.dtype):
        return high
    return np.add(high, low, dtype=np.float64)
