"""What compiling leaves free in the C library's heap, given back to the system."""

import ctypes
import functools
from collections.abc import Callable


def give_back_free_memory() -> None:
    """Has the C library give its free memory back, where it can be told to.

    The compiler takes 100 MB and more in small pieces. Once they are free, glibc keeps them where
    anything above is still in use, and what training allocates comes on top. Giving them back
    takes some milliseconds.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """The function `malloc_trim` of glibc; None where there is another library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # The last is of Windows.
        return None
