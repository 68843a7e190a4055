"""What compiling leaves free in the C library's heap, given back to the system."""

import ctypes
import functools
from collections.abc import Callable


def give_back_free_memory() -> None:
    """Has glibc give the free memory of its heap back; other C libraries are left alone.

    The compiler takes 100 MB and more in small pieces. Once they are free, glibc keeps them, as
    others between them are still in use, and what training allocates comes on top. Giving them
    back takes some milliseconds; of a large heap in many parts, a tenth of a second.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """The function `malloc_trim` of glibc; None with another C library."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # The last is of Windows.
        return None
    trim.argtypes = [ctypes.c_size_t]
    return trim
