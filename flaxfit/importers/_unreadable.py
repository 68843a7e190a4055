"""UnreadableFile: the error for files that contradict their format, and the checks."""

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from flaxfit.display import first_line

_SIGNS_OF_DAMAGE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
_EXTENDED_DTYPES = frozenset(
    ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "int4", "uint4")
)


class UnreadableFile(ValueError):
    """A file is damaged, truncated, forged, or of an unsupported kind.

    >>> raise UnreadableFile("Cannot read weights.npz: it is cut short.")
    Traceback (most recent call last):
    flaxfit.importers._unreadable.UnreadableFile: Cannot read weights.npz: it is cut short.
    """


@contextmanager
def reading(path: object, kind: str, *also: type[Exception]) -> Iterator[None]:
    """Converts parsing errors, and the types `also`, to `UnreadableFile`.

    So parsers may index and unpack freely. But they must check a size that the file states against
    the bytes that exist before they allocate it.
    """
    try:
        yield
    except UnreadableFile:
        raise
    except (*_SIGNS_OF_DAMAGE, *also) as error:
        raise UnreadableFile(
            f"Cannot read {path}: it is not {kind}, or it is damaged "
            f"({first_line(error)}). Fetch or write it again."
        ) from error


def require(condition: bool, message: str) -> None:
    """Raises a `ValueError`, whose message `reading` completes, unless a condition holds."""
    if not condition:
        raise ValueError(message)


def as_dtype(name: object) -> np.dtype:
    """Returns the numeric dtype that a file names.

    >>> as_dtype("bfloat16"), as_dtype("<f4")
    (dtype(bfloat16), dtype('float32'))
    """
    try:
        dtype = np.dtype(name) if isinstance(name, str) else None
    except TypeError:
        dtype = None
    if dtype is None or not (dtype.kind in "biufc" or name in _EXTENDED_DTYPES):
        raise ValueError(f"it names the dtype {str(name)!r:.40}, which is not numeric")
    return dtype
