"""DataStream: what the loop reads batches from; `take`: the first few of them."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, Self, runtime_checkable

# Steps are int32: so many batches are more than a run can take.
_ENDLESS = 2**31 - 1


@runtime_checkable
class DataStream(Protocol):
    """An iterator of batches that knows its position.

    A stream may also have `get_state() -> state` and `set_state(state)`, where the state is
    JSON-able and stands for the batches delivered so far; `epoch`, the number of completed passes;
    and `shared`, False where each process is given a share of its own of every batch (missing:
    True). Streams made by `as_stream` have all four.

    >>> isinstance(iter([1, 2]), DataStream)
    True
    """

    def __iter__(self) -> Self:
        """The stream itself: iterating continues at the present position."""
        ...

    def __next__(self) -> Any:
        """The next batch."""
        ...


def is_shared(stream: Any) -> bool:
    """Whether a stream gives every process the same batches.

    >>> is_shared(iter([1, 2]))
    True
    """
    return getattr(stream, "shared", True)


def pass_length(stream: Any, advice: str) -> int | None:
    """The number of batches in a pass over a stream, where it is known.

    >>> pass_length([1, 2], "Give data that ends."), pass_length(iter([1]), "")
    (2, None)

    Raises:
      ValueError: it repeats for ever.
    """
    try:
        n_batches = len(stream)
    except TypeError:
        return None
    if n_batches >= _ENDLESS:
        raise ValueError(f"Cannot tell where an epoch ends: the data repeats for ever. {advice}")
    return n_batches


def take(stream: Iterable[Any], n: int) -> Iterator[Any]:
    """Takes the next `n` batches of a stream, which stays positioned after them.

    >>> list(take(iter("abc"), 2))
    ['a', 'b']
    """
    if n < 0:
        raise ValueError(f"Cannot take {n} batches: n must be 0 or more.")
    return itertools.islice(stream, n)
