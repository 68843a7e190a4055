"""Memory-mapped arrays: read a few rows at a time without keeping what was read."""

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

_KEEP = 64 * 2**20
# The system maps this much around every page that is read.
_AROUND = 64 * 2**10


def mapping_of(array: np.ndarray) -> mmap.mmap | None:
    """The memory-mapped file that an array lies in, or None.

    >>> mapping_of(np.zeros(3)) is None
    True
    """
    return next((base for base in _bases(array) if isinstance(base, mmap.mmap)), None)


class Releaser:
    """Hands the pages of a mapped file back to the system after every 64 MB that were read.

    They count as memory of the process otherwise, until all of the file does. Arrays that view
    them stay valid: a page that is needed again is read again.
    """

    def __init__(self, array: np.ndarray):
        modes = {base.mode for base in _bases(array) if isinstance(base, np.memmap)}
        # Changes to a copy-on-write mapping exist nowhere but in the pages.
        safe = modes and "c" not in modes and hasattr(mmap, "MADV_DONTNEED")
        self._mapping = mapping_of(array) if safe else None
        self._read = 0

    def note(self, rows: np.ndarray, *, scattered: bool) -> None:
        """Counts rows that were read, and hands pages back when it is much."""
        self._read += max(rows.nbytes, len(rows) * _AROUND if scattered else 0)
        if self._read > _KEEP and self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)
            self._read = 0


def _bases(array: Any) -> Iterator[Any]:
    """An array and what it views, down to the owner of the memory."""
    while array is not None:
        yield array
        array = getattr(array, "base", None)
