"""Columns: selects rows of the arrays of a data set, and checks their common length."""

from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from flaxfit.data._mapped import MappedArray, MappedRows, mapping_of
from flaxfit.tree import (
    ArrayLike,
    PyTree,
    check_dense,
    is_array,
    is_sparse,
    narrow,
    narrow_dtype,
    to_numpy,
)

Rows = slice | np.ndarray


class Column:
    """One array of a data set, in the width that JAX computes in."""

    pick: Callable[[Rows], np.ndarray]
    """Returns the rows of a slice (a view, if possible) or of an array of row numbers."""

    def __init__(self, leaf: ArrayLike):
        chosen = leaf.rows if isinstance(leaf, MappedRows) else None
        array = to_numpy(leaf.array if isinstance(leaf, MappedRows) else leaf)
        self._dtype = narrow_dtype(array.dtype)
        self.nbytes = array.size * self._dtype.itemsize
        self.is_mapped = mapping_of(array) is not None
        if self.is_mapped:
            # Do not narrow here: that would read the whole file.
            mapped, dtype = MappedArray(array), self._dtype
            self._array = None
            self.pick = lambda rows: narrow(
                mapped.pick(rows if chosen is None else chosen[rows]), dtype
            )
        else:
            self._array = narrow(array, self._dtype)
            self.pick = _picker(self._array)

    def batches(self, first: int, last: int, size: int) -> Iterable[np.ndarray]:
        """Returns the batches from `first` to `last`, of `size` rows.

        They are read-only views, unless the array is mapped from a file.
        """
        if self._array is None:
            return (self.pick(slice(i * size, (i + 1) * size)) for i in range(first, last))
        views = self._array[first * size : last * size].view()
        views.flags.writeable = False
        # NumPy makes the views several times faster than slices one by one.
        return views.reshape(last - first, size, *views.shape[1:])


def _picker(array: np.ndarray) -> Callable[[Rows], np.ndarray]:
    # `take` is fastest, but first copies a whole array that is not contiguous.
    if array.flags.c_contiguous and array.flags.aligned:
        return lambda rows: array[rows] if isinstance(rows, slice) else array.take(rows, axis=0)
    return array.__getitem__


def common_length(parts: Sequence[PyTree], names: Sequence[str] = ("x", "y", "w")) -> int:
    """Returns the number of rows of a data set; checks that all parts are arrays of that length."""
    n, first = None, ""
    for path, leaf in jax.tree.leaves_with_path(parts, is_leaf=is_sparse):
        name = names[int(path[0].idx)] + jax.tree_util.keystr(path[1:])
        check_dense(leaf)
        if not is_array(leaf):
            raise TypeError(
                f"{name} must be an array, got {type(leaf).__name__}: {leaf!r:.60}. "
                "Convert lists with np.asarray; put several arrays into a tuple or a mapping, and "
                "batches into a list."
            )
        shape = np.shape(leaf)
        if not shape:
            raise TypeError(f"{name} must hold one row per example, got the scalar {leaf!r:.60}.")
        n, first = (shape[0], name) if n is None else (n, first)
        if shape[0] != n:
            raise ValueError(f"{first} has {n:,} rows but {name} has {shape[0]:,}.")
    if n is None:
        raise ValueError(f"{names[0]} is empty.")
    if n == 0:
        raise ValueError(f"The data holds no examples: {first} has 0 rows.")
    return n
