"""Memory-mapped arrays, whose pages are released after reading."""

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

from flaxfit.tree import ArrayLike

_KEEP = 64 * 2**20
# Reading a page may map this many bytes around it, the unit of the system's page cache.
_AROUND = 2 * 2**20


def mapping_of(array: np.ndarray) -> mmap.mmap | None:
    """Returns the memory-mapped file of an array, or None."""
    return next((base for base in _bases(array) if isinstance(base, mmap.mmap)), None)


class MappedArray:
    """An array in a memory-mapped file that releases the pages it has read.

    Else the pages would count as memory of the process, up to the size of the file. Views of the
    array stay valid: a page that is needed again is read again.
    """

    def __init__(self, array: np.ndarray):
        self._array = array
        modes = {base.mode for base in _bases(array) if isinstance(base, np.memmap)}
        # Changes to a copy-on-write mapping exist only in its pages: releasing would lose them.
        safe = modes and "c" not in modes and hasattr(mmap, "MADV_DONTNEED")
        self._mapping = mapping_of(array) if safe else None
        self._read = 0

    def pick(self, rows: slice | np.ndarray) -> np.ndarray:
        """Returns the rows of a slice, as a view, or of row numbers, copied in chunks."""
        if isinstance(rows, slice):
            picked = self._array[rows]
            self._release_after(picked.nbytes)
            return picked
        picked = np.empty((len(rows), *self._array.shape[1:]), self._array.dtype)
        read_per_row = picked.nbytes // len(rows) + _AROUND
        n = max(1, _KEEP // read_per_row)
        for start in range(0, len(rows), n):
            chunk = rows[start : start + n]
            picked[start : start + n] = self._array[chunk]
            self._release_after(len(chunk) * read_per_row)
        return picked

    def _release_after(self, n_bytes: int) -> None:
        """Counts the bytes read, and releases all pages above a limit."""
        self._read += n_bytes
        if self._read >= _KEEP and self._mapping is not None:
            # Drops clean pages only from this process: the page cache keeps them for a next read.
            self._mapping.madvise(mmap.MADV_DONTNEED)
            self._read = 0


class MappedRows:
    """Selected rows of a memory-mapped array, read on demand."""

    def __init__(self, array: np.ndarray, rows: np.ndarray):
        self.array, self.rows = array, rows
        self.shape, self.dtype = (len(rows), *array.shape[1:]), array.dtype

    def __len__(self) -> int:
        return len(self.rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.array[self.rows], dtype)


def rows_at(array: ArrayLike, rows: np.ndarray) -> ArrayLike:
    """Selects rows of an array; does not read them if it is memory-mapped."""
    array = np.asarray(array)
    return array[rows] if mapping_of(array) is None else MappedRows(array, rows)


def _bases(array: ArrayLike) -> Iterator[object]:
    """Yields an array and the bases that it is a view of, down to the owner of the memory."""
    while array is not None:
        yield array
        array = getattr(array, "base", None)
