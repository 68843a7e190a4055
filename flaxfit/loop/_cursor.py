"""Cursor: a position in a stream, behind the last batch that was trained on."""

from typing import Any

from flaxfit.data import ArrayStream, as_stream
from flaxfit.data._batch import detached
from flaxfit.loop._local_rows import knows_rows
from flaxfit.tree._types import Data, Json


class Cursor:
    """Fetches batches, and knows the position behind the last one that was trained on.

    A fetched batch stays until `stepped` commits it, so a failure in between loses none.

    >>> import numpy as np
    >>> cursor = Cursor(np.arange(4))
    >>> cursor.peek()[0].shape, cursor.is_between_batches
    ((4,), False)
    >>> cursor.stepped(1)
    >>> cursor.is_between_batches
    True

    Args:
      data: whatever `as_stream` takes, or None for no data.
    """

    def __init__(self, data: Data):
        self.has_data = data is not None
        self.stream: Any = as_stream(data) if self.has_data else iter(())
        self.gathers: bool = getattr(self.stream, "resident", False)
        """Whether the data is resident: placed on the devices, which gather batches there."""
        self.takes_rows = self.gathers or knows_rows(self.stream)
        """Whether fetched items are indices of rows, not examples."""
        self.ended = False
        """Whether there are no more batches."""
        self.is_resumed = False
        """Whether it was moved to the position of a checkpoint."""
        self.fetched: list[tuple[Any, Any]] = []
        """Items that were not trained on yet, each with the position after it."""
        self._position: Json = None
        self._has_run_out = False
        """Whether the stream has stopped; one that stops after each pass would start another."""

    def move_to(self, position: Json) -> None:
        """Moves to the position of a checkpoint, if it has one and the stream can."""
        if position is not None and hasattr(self.stream, "set_state"):
            self.stream.set_state(position)
            self.fetched.clear()
            self.ended, self.is_resumed, self._has_run_out = False, True, False

    def fetch_one(self, *, is_ahead: bool = False) -> Any:
        """Fetches the item behind those that were fetched.

        Args:
          is_ahead: whether it may not be trained on at once; only then its position is read.

        Raises:
          StopIteration: there is none.
        """
        if self._has_run_out:
            raise StopIteration
        try:
            item = self.stream.next_rows() if self.takes_rows else next(self.stream)
        except StopIteration:
            self._has_run_out = True
            raise
        self.fetched.append((item, self.stream_position() if is_ahead else None))
        return item

    def fetch(self, n: int, *, is_ahead: bool = False) -> list[Any]:
        """The next `n` items, fewer at the end of the data.

        Raises:
          ValueError: there never was any data.
        """
        if not self.has_data:
            raise ValueError(
                "The task has no data: give TrainTask(data=...), or train on batches of your own, "
                "TrainLoop(..., input_sample=x) and loop.next_step(batch)."
            )
        if n == 1 and not self.fetched:
            try:
                return [self.fetch_one(is_ahead=is_ahead)]
            except StopIteration:
                return []
        while len(self.fetched) < n:
            if self.fetched and not (self.takes_rows or isinstance(self.stream, ArrayStream)):
                item, position = self.fetched[-1]
                self.fetched[-1] = detached(item), position
            try:
                self.fetch_one(is_ahead=is_ahead or n > 1)
            except StopIteration:
                break
        return [item for item, _ in self.fetched[:n]]

    def peek(self) -> list[Any]:
        """The next item, which stays to be trained on; none at the end of the data."""
        if not self.fetched:
            self._position = self.stream_position()
        return self.fetch(1, is_ahead=True)

    def stepped(self, n: int) -> None:
        """Commits the first `n` fetched items: they were trained on."""
        self._position = self.fetched[n - 1][1]
        del self.fetched[:n]

    @property
    def is_between_batches(self) -> bool:
        """Whether no fetched item waits to be trained on."""
        return not self.fetched

    def position(self) -> Json:
        """The position behind the last item that was trained on; None if it is unknown."""
        return self._position if self.fetched else self.stream_position()

    def stream_position(self) -> Json:
        """The position behind the last item that was fetched; None if it is unknown."""
        return self.stream.get_state() if hasattr(self.stream, "get_state") else None

    def examples(self, item: Any) -> Any:
        """The batch of a fetched item."""
        return self.stream.pick(item) if self.takes_rows else item
