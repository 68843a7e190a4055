"""The arrays of a data set: how many rows they share, and how rows are picked."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from flaxfit.data._mapped import MappedArray, mapping_of
from flaxfit.tree._dtypes import is_array, narrow, narrow_dtype, to_numpy
from flaxfit.tree._types import ArrayLike


class Column:
    """One array of a data set, memory-mapped (`is_mapped`) or not.

    >>> Column(np.array([1.5, 2.5, 3.5])).pick(slice(1, 3))
    array([2.5, 3.5], dtype=float32)

    Raises:
      TypeError: the array holds no numbers.
      ValueError: an integer does not fit the width that JAX computes in.
    """

    def __init__(self, leaf: ArrayLike):
        array = to_numpy(leaf)
        self._dtype = narrow_dtype(array.dtype)
        self.nbytes = array.size * self._dtype.itemsize
        self.is_mapped = mapping_of(array) is not None
        if self.is_mapped:
            # Narrowing a memory-mapped file at once would read all of it.
            self._pick = MappedArray(array).pick
        else:
            self._pick = _picker(narrow(array, self._dtype))

    def pick(self, rows: Any) -> np.ndarray:
        """The rows at a slice (a view, where possible) or at an array of indices."""
        picked = self._pick(rows)
        return picked if picked.dtype == self._dtype else narrow(picked, self._dtype)


def _picker(array: np.ndarray) -> Callable[[Any], np.ndarray]:
    # `take` is the fastest, but copies the whole array first if it is not contiguous.
    if array.flags.c_contiguous and array.flags.aligned:
        return lambda rows: array[rows] if isinstance(rows, slice) else array.take(rows, axis=0)
    return array.__getitem__


def common_length(parts: tuple[Any, ...]) -> int:
    """The number of rows that all arrays of a data set share.

    >>> common_length((np.zeros((5, 2)), np.zeros(5)))
    5

    Args:
      parts: x, y and w, trees of arrays.

    Raises:
      TypeError: a leaf is not an array of rows.
      ValueError: there are no rows, or different numbers of them.
    """
    n, first = None, ""
    for path, leaf in jax.tree.leaves_with_path(parts):
        name = "xyw"[path[0].idx] + jax.tree_util.keystr(path[1:])
        if not is_array(leaf):
            raise TypeError(
                f"{name} must be an array, got {type(leaf).__name__}: {leaf!r:.60}. "
                "Convert lists with np.asarray; several arrays go into a tuple or a mapping."
            )
        shape = np.shape(leaf)
        if not shape:
            raise TypeError(f"{name} must hold one row per example, got the scalar {leaf!r:.60}.")
        n, first = (shape[0], name) if n is None else (n, first)
        if shape[0] != n:
            raise ValueError(f"{first} has {n:,} rows but {name} has {shape[0]:,}.")
    if not n:
        raise ValueError("The data holds no examples: x has 0 rows." if n == 0 else "x is empty.")
    return n
