"""The protocol of streams, and functions of any stream."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Protocol, Self, TypeVar, runtime_checkable

from flaxfit.tree import Data, PyTree

T = TypeVar("T")
# Steps are int32: no run takes that many batches.
_ENDLESS = 2**31 - 1


@runtime_checkable
class DataStream(Protocol):
    """An iterator of batches that knows its position.

    A stream may also have `get_state() -> state` and `set_state(state)`, where the state is
    JSON-able and describes the batches delivered so far; `epoch`, the number of completed passes;
    and `shared`, False if each process receives its own part of every batch (default: True).
    Streams made by `as_stream` have all four.

    >>> isinstance(iter([1, 2]), DataStream)
    True
    """

    def __iter__(self) -> Self:
        """Returns the stream itself: iterating continues at the current position."""
        ...

    def __next__(self) -> PyTree:
        """Returns the next batch."""
        ...


def is_shared(stream: object) -> bool:
    """Returns whether a stream gives every process the same batches."""
    return getattr(stream, "shared", True)


def is_read_once(data: Data) -> bool:
    """Returns whether data is a generator or other built-in iterator, readable only once.

    A user-defined iterator class may start again.

    >>> is_read_once(iter([1])), is_read_once([1])
    (True, False)
    """
    return isinstance(data, Iterator) and type(data).__module__ in ("builtins", "itertools")


def pass_length(stream: Data, advice: str) -> int | None:
    """Returns the number of batches in a pass over a stream, or None if unknown.

    Raises:
      ValueError: the stream repeats forever.
    """
    try:
        n_batches = len(stream)
    except TypeError:
        return None
    if n_batches >= _ENDLESS:
        raise ValueError(f"Cannot tell where an epoch ends: the data repeats forever. {advice}")
    return n_batches


def take(stream: Iterable[T], n: int) -> Iterator[T]:
    """Takes the next `n` batches of a stream, and leaves its position after them.

    >>> list(take(iter("abc"), 2))
    ['a', 'b']
    """
    if n < 0:
        raise ValueError(f"Cannot take {n} batches: n must be 0 or more.")
    return itertools.islice(stream, n)
