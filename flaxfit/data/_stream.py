"""DataStream: what the loop reads batches from; `take`: the first few of them."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, Self, runtime_checkable


@runtime_checkable
class DataStream(Protocol):
    """An iterator of batches that knows its position.

    A stream may also have `get_state() -> state` and `set_state(state)`, where the state is
    JSON-able and stands for the batches delivered so far, and `epoch`, the number of completed
    passes. Streams made by `as_stream` have all three.

    >>> isinstance(iter([1, 2]), DataStream)
    True
    """

    def __iter__(self) -> Self:
        """The stream itself: iterating goes on from the present position."""
        ...

    def __next__(self) -> Any:
        """The next batch."""
        ...


def take(stream: Iterable[Any], n: int) -> Iterator[Any]:
    """Takes the next `n` batches of a stream, which stays positioned after them.

    >>> list(take(iter("abc"), 2))
    ['a', 'b']
    """
    if n < 0:
        raise ValueError(f"Cannot take {n} batches: n must be 0 or more.")
    return itertools.islice(stream, n)
