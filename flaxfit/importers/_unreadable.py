"""The one error for files that are not what their format says."""

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


class UnreadableFile(ValueError):
    """A file is damaged, cut short, made to mislead, or of a kind that is not supported.

    >>> raise UnreadableFile("Cannot read weights.npz: it is cut short.")
    Traceback (most recent call last):
    flaxfit.importers._unreadable.UnreadableFile: Cannot read weights.npz: it is cut short.
    """


@contextmanager
def reading(path: Any, kind: str, *also: type[Exception]) -> Iterator[None]:
    """Turns whatever parsing trips over into `UnreadableFile`.

    Parsers may then index and unpack freely. What they must do themselves is to compare a size
    that the file states with the bytes that are there, before anything of that size is made.

    Args:
      path: the file, for the message.
      kind: what the file should be, such as "a safetensors file".
      *also: further types of errors that mean damage.
    """
    try:
        yield
    except UnreadableFile:
        raise
    except (*_SIGNS_OF_DAMAGE, *also) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise UnreadableFile(
            f"Cannot read {path}: it is not {kind}, or it is damaged "
            f"({type(error).__name__}: {first:.200}). Fetch or write it again."
        ) from error


def require(condition: bool, what: str) -> None:
    """Raises a `ValueError` that says what is wrong, for `reading` to complete."""
    if not condition:
        raise ValueError(what)
