"""Cursor: a position in a stream, behind the last batch that was trained on."""

import contextlib
from typing import Any

import jax
import numpy as np

from flaxfit.data import ArrayStream, as_stream
from flaxfit.data._batch import detached
from flaxfit.data._prefetch import PrefetchedStream
from flaxfit.loop._local_rows import knows_rows
from flaxfit.tree import Data, Json, PyTree


class Cursor:
    """Fetches batches, and knows the position behind the last one that was trained on.

    A fetched item stays until `stepped` commits it, so a failure in between loses none. `data` is
    what `as_stream` takes, or None.
    """

    def __init__(self, data: Data, *, is_trained_on: bool = True):
        self.has_data = data is not None
        self.stream: Any = as_stream(data) if self.has_data else iter(())
        self.gathers: bool = is_trained_on and getattr(self.stream, "resident", False)
        """Whether the data is resident: placed on the devices, which gather batches there."""
        self.takes_rows = self.gathers or knows_rows(self.stream)
        """Whether fetched items are indices of rows, not examples."""
        self._is_own = is_trained_on and type(self.stream) is ArrayStream
        """Whether no method of the stream is the user's own."""
        self._makes_arrays = self._is_own or type(self.stream) is PrefetchedStream
        """Whether the arrays of a batch are new ones, or views of the user's."""
        self.ended = False
        """Whether there are no more batches."""
        self.is_resumed = False
        """Whether it was moved to the position of a checkpoint."""
        self._fetched: list[tuple[PyTree, Json]] = []
        """Items that were not trained on yet, each with the position after it."""
        self._position: Json = None
        self._has_run_out = False
        """Whether the stream has stopped; one that stops after each pass would start another."""

    def move_to(self, position: Json) -> None:
        """Moves to the position of a checkpoint, if it has one and the stream can."""
        if position is not None and hasattr(self.stream, "set_state"):
            self.stream.set_state(position)
            self._fetched.clear()
            self.ended, self.is_resumed, self._has_run_out = False, True, False

    def fetch(self, n: int, *, is_ahead: bool = False) -> list[PyTree]:
        """Returns the next `n` items, fewer at the end of the data.

        Positions are read only if items may not be trained on at once: of several, or `is_ahead`.
        """
        if not self.has_data:
            raise ValueError(
                "The task has no data: give TrainTask(data=...), or train on batches of your own, "
                "TrainLoop(..., input_sample=x) and loop.next_step(batch)."
            )
        if n > 1 and self.gathers and self._is_own and not self._fetched:
            with contextlib.suppress(StopIteration):  # Raised again by what follows.
                self._fetched = self.stream.next_rows_of(n)
        while len(self._fetched) < n and not self._has_run_out:
            if self._fetched and not (self.takes_rows or isinstance(self.stream, ArrayStream)):
                item, position = self._fetched[-1]
                self._fetched[-1] = detached(item), position
            try:
                item = self._next()
            except StopIteration:
                self._has_run_out = True
                break
            is_known = is_ahead or n > 1
            self._fetched.append((item, self.stream_position() if is_known else None))
        return [item for item, _ in self._fetched[:n]]

    def peek(self) -> list[PyTree]:
        """Returns the next item, which stays to be trained on; none at the end of the data."""
        if not self._fetched:
            self._position = self.stream_position()
        return self.fetch(1, is_ahead=True)

    def stepped(self, n: int) -> None:
        """Commits the first `n` fetched items: devices train on them."""
        self._position = self._fetched[n - 1][1]
        del self._fetched[:n]

    def shuffle_ahead(self) -> None:
        """Shuffles the next epoch while the devices compute."""
        if self._is_own and not self._fetched:
            self.stream.order_ahead()

    @property
    def is_between_batches(self) -> bool:
        """Whether no fetched item waits to be trained on."""
        return not self._fetched

    def position(self) -> Json:
        """Returns the position behind the last item that was trained on; None if unknown."""
        return self._position if self._fetched else self.stream_position()

    def stream_position(self) -> Json:
        """Returns the position behind the last item that was fetched; None if unknown."""
        return self.stream.get_state() if hasattr(self.stream, "get_state") else None

    def examples(self, item: PyTree) -> PyTree:
        """Returns the batch of a fetched item."""
        return self.stream.pick(item) if self.takes_rows else item

    def whole(self) -> PyTree:
        """Returns all examples as one batch; None if the stream cannot give them."""
        return self.stream.whole() if hasattr(self.stream, "whole") else None

    def _next(self) -> PyTree:
        if self.takes_rows:
            return self.stream.next_rows()
        item = next(self.stream)
        if self._makes_arrays:
            _make_read_only(item)
        return item


def _make_read_only(item: PyTree) -> None:
    """Tells strategies not to copy the new arrays of an item, as nobody writes to them."""
    with contextlib.suppress(ValueError):  # JAX cannot sort its keys.
        for leaf in jax.tree.leaves(item):
            if isinstance(leaf, np.ndarray) and leaf.base is None:
                leaf.flags.writeable = False
