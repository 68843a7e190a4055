"""Source: the batches of a stream, of which some may be fetched before they are stepped."""

from typing import Any

from flaxfit.data import as_stream
from flaxfit.loop._local_rows import knows_rows


class Source:
    """Fetches batches, and tells the position in the data behind the last one that was stepped.

    A batch that was fetched stays until it is known to be stepped: what fails in between loses
    none.

    >>> import numpy as np
    >>> source = Source(np.arange(4))
    >>> source.peek()[0].shape, source.is_between_batches
    ((4,), False)
    >>> source.stepped(1)
    >>> source.is_between_batches
    True

    Args:
      data: whatever `as_stream` takes; None: there is none.
    """

    def __init__(self, data: Any):
        self.has_data = data is not None
        self.stream: Any = as_stream(data) if self.has_data else iter(())
        self.gathers: bool = getattr(self.stream, "resident", False)
        """Whether the data is to lie on the devices, and batches are gathered there."""
        self.takes_rows = self.gathers or knows_rows(self.stream)
        """Whether what is fetched are the numbers of rows, and no examples."""
        self.ended = False
        """Whether there are no more batches."""
        self.is_resumed = False
        """Whether it has moved to where a checkpoint was made."""
        self.fetched: list[tuple[Any, Any]] = []
        """Batches that were not stepped yet, each with the position behind it."""
        self._position: Any = None
        self._has_run_out = False
        """Whether the stream has stopped: one that stops after each pass would begin the next."""

    def move_to(self, position: Any) -> None:
        """Goes on where a checkpoint was made, if that tells and the stream can."""
        if position is not None and hasattr(self.stream, "set_state"):
            self.stream.set_state(position)
            self.fetched.clear()
            self.ended, self.is_resumed, self._has_run_out = False, True, False

    def fetch_one(self, *, is_ahead: bool = False) -> Any:
        """Fetches the batch behind those that are fetched.

        Args:
          is_ahead: whether it may not be stepped at once: the position is asked for only then.

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
        """The next `n` batches to be stepped, fewer at the end of the data.

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
            try:
                self.fetch_one(is_ahead=is_ahead or n > 1)
            except StopIteration:
                break
        return [item for item, _ in self.fetched[:n]]

    def peek(self) -> list[Any]:
        """The next batch, which stays to be stepped; empty at the end of the data."""
        if not self.fetched:
            self._position = self.stream_position()
        return self.fetch(1, is_ahead=True)

    def stepped(self, n: int) -> None:
        """Lets go of the first `n` that were fetched; 0: of others, which came from the stream."""
        self._position = self.fetched[n - 1][1] if n else None
        del self.fetched[:n]

    @property
    def is_between_batches(self) -> bool:
        """Whether the stream stands right behind the last batch that was stepped."""
        return not self.fetched

    def position(self) -> Any:
        """The position behind the last batch that was stepped; None if none is told."""
        return self._position if self.fetched else self.stream_position()

    def stream_position(self) -> Any:
        """The position behind the last batch that was fetched; None if none is told."""
        return self.stream.get_state() if hasattr(self.stream, "get_state") else None

    def examples(self, item: Any) -> Any:
        """The batch of what was fetched, where that are rows."""
        return self.stream.pick(item) if self.takes_rows else item
