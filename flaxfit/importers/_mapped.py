"""Arrays that lie as plain bytes in a file, mapped into memory: a page is read when touched."""

import math
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from flaxfit.importers._lazy import LazyArray, LazyThreadPoolArray
from flaxfit.importers._unreadable import require


def map_file(path: Path) -> Any:
    """The bytes of a file as a read-only buffer that takes no memory of its own."""
    with path.open("rb") as file:
        # An empty file cannot be mapped.
        if os.fstat(file.fileno()).st_size == 0:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def mapped_array(
    content: Any, start: int, stop: int, shape: tuple[int, ...], dtype: np.dtype
) -> LazyArray:
    """The array between two positions, once its shape and the positions fit together."""
    require(all(type(n) is int and n >= 0 for n in (*shape, start, stop)), "a size is no number")
    require(start <= stop <= len(content), "an array lies outside of the file")
    require(len(shape) <= 32, "an array has more than 32 dimensions")
    size = math.prod(shape)
    require(size * dtype.itemsize == stop - start, "the size of an array is wrong")
    require(all(n <= 1 << 62 for n in shape), "a dimension is too long")

    def read() -> np.ndarray:
        if not size:
            return np.zeros(shape, dtype)
        return np.frombuffer(content, dtype, size, start).reshape(shape)

    return LazyThreadPoolArray(shape, dtype, read)
