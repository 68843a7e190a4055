"""Memory-mapped arrays: read a few rows at a time without keeping what was read."""

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

from flaxfit.tree._types import ArrayLike

_KEEP = 64 * 2**20
# Reading one page may map as much around it: what the system keeps in one piece.
_AROUND = 2 * 2**20


def mapping_of(array: np.ndarray) -> mmap.mmap | None:
    """The memory-mapped file that an array lies in, or None.

    >>> mapping_of(np.zeros(3)) is None
    True
    """
    return next((base for base in _bases(array) if isinstance(base, mmap.mmap)), None)


class MappedArray:
    """An array in a memory-mapped file, which hands back the pages it has read.

    They count as memory of the process otherwise, until all of the file does. Views of the array
    stay valid: a page that is needed again is read again.

    >>> MappedArray(np.arange(4)).pick(np.array([2, 0]))
    array([2, 0])
    """

    def __init__(self, array: np.ndarray):
        self._array = array
        modes = {base.mode for base in _bases(array) if isinstance(base, np.memmap)}
        # Changes to a copy-on-write mapping exist nowhere but in the pages.
        safe = modes and "c" not in modes and hasattr(mmap, "MADV_DONTNEED")
        self._mapping = mapping_of(array) if safe else None
        self._read = 0

    def pick(self, rows: Any) -> np.ndarray:
        """The rows at a slice, as a view, or at an array of indices, a few at a time."""
        if isinstance(rows, slice):
            picked = self._array[rows]
            self._hand_back(picked.nbytes)
            return picked
        picked = np.empty((len(rows), *self._array.shape[1:]), self._array.dtype)
        read_per_row = picked.nbytes // len(rows) + _AROUND
        n = max(1, _KEEP // read_per_row)
        for start in range(0, len(rows), n):
            chunk = rows[start : start + n]
            picked[start : start + n] = self._array[chunk]
            self._hand_back(len(chunk) * read_per_row)
        return picked

    def _hand_back(self, n_bytes: int) -> None:
        """Counts what was read; hands all pages back when it is much."""
        self._read += n_bytes
        if self._read >= _KEEP and self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)
            self._read = 0


def _bases(array: ArrayLike) -> Iterator[Any]:
    """An array and what it views, down to the owner of the memory."""
    while array is not None:
        yield array
        array = getattr(array, "base", None)
