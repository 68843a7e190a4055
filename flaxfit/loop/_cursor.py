"""Cursor: reads a stream ahead, and tracks the position after the last committed batch."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from flaxfit.data import ArrayStream, as_stream
from flaxfit.data._arrays import rest_of_pass
from flaxfit.data._batch import detached
from flaxfit.data._prefetch import PrefetchedStream
from flaxfit.loop._local_rows import knows_rows
from flaxfit.tree import Data, Json, PyTree


class Cursor:
    """Fetches items of a stream, and commits them once a step has been dispatched with them.

    A fetched item stays in the queue until `stepped` commits it, so a failed step loses no data.
    `data` is anything that `as_stream` takes, or None.
    """

    def __init__(self, data: Data, *, is_trained_on: bool = True):
        self.has_data = data is not None
        self.stream: Any = as_stream(data) if self.has_data else iter(())
        self.gathers: bool = is_trained_on and getattr(self.stream, "resident", False)
        """Whether the data is resident: placed on the devices, which gather batches there."""
        self.takes_rows = self.gathers or knows_rows(self.stream)
        """Whether fetched items are indices of rows, not examples."""
        self._is_array_stream = is_trained_on and type(self.stream) is ArrayStream
        """Whether it trains on an `ArrayStream` itself: a subclass may override its methods."""
        self._makes_arrays = self._is_array_stream or type(self.stream) is PrefetchedStream
        """Whether the stream assembles batches itself: new arrays, or views of the user's."""
        self.ended = False
        """Whether a step found no batch."""
        self.is_resumed = False
        """Whether `move_to` restored a position."""
        self._fetched: list[tuple[PyTree, Json]] = []
        """The fetched items that are not committed, each with the position after it."""
        self._position: Json = None
        self._has_run_out = False
        """Whether the stream raised StopIteration; `next` would start another pass of some."""

    def move_to(self, position: Json) -> None:
        """Moves to the position of a checkpoint, if there is one and the stream supports it."""
        if position is not None and hasattr(self.stream, "set_state"):
            self.stream.set_state(position)
            self._fetched.clear()
            self.ended, self.is_resumed, self._has_run_out = False, True, False

    def fetch(self, n: int, *, is_ahead: bool = False) -> list[PyTree]:
        """Returns the next `n` items, fewer at the end of the data.

        Positions are read only for items that may stay in the queue: of several, or `is_ahead`.
        """
        if not self.has_data:
            raise ValueError(
                "The task has no data: give TrainTask(data=...), or train on batches of your own, "
                "TrainLoop(..., input_sample=x) and loop.next_step(batch)."
            )
        if n > 1 and self.gathers and self._is_array_stream and not self._fetched:
            with contextlib.suppress(StopIteration):  # The loop below meets it again.
                self._fetched = self.stream.next_rows_of(n)
        while len(self._fetched) < n and not self._has_run_out:
            # A user's stream may refill one buffer: copy the previous item before reading on.
            if self._fetched and not (self.takes_rows or isinstance(self.stream, ArrayStream)):
                item, position = self._fetched[-1]
                self._fetched[-1] = detached(item), position
            try:
                item = self.stream.next_rows() if self.takes_rows else next(self.stream)
            except StopIteration:
                self._has_run_out = True
                break
            if self._makes_arrays and not self.takes_rows:
                _make_read_only(item)
            is_known = is_ahead or n > 1
            self._fetched.append((item, self.stream_position() if is_known else None))
        return [item for item, _ in self._fetched[:n]]

    def peek(self) -> list[PyTree]:
        """Returns the next item without committing it; an empty list at the end of the data."""
        if not self._fetched:
            self._position = self.stream_position()
        return self.fetch(1, is_ahead=True)

    def remaining(self, *, as_views: bool) -> Iterator[PyTree]:
        """Iterates over the other items of a single pass, without keeping positions.

        Args:
          as_views: whether full batches of an `ArrayStream` are read-only views, which need not be
            copied if the pass ends before its caller can change the arrays.
        """
        yield from (item for item, _ in self._fetched)
        self._fetched.clear()
        stream: Any = self.stream
        if as_views and type(stream) is ArrayStream and not self.takes_rows:
            stream = rest_of_pass(stream)
        advance = stream.next_rows if self.takes_rows else stream.__next__
        while not self._has_run_out:
            try:
                item = advance()
            except StopIteration:
                self._has_run_out = True
                break
            if self._makes_arrays and not self.takes_rows:
                _make_read_only(item)
            yield item

    def stepped(self, n: int) -> None:
        """Commits the first `n` fetched items, after their step was dispatched."""
        self._position = self._fetched[n - 1][1]
        del self._fetched[:n]

    def shuffle_ahead(self) -> None:
        """Shuffles the next epoch while the devices compute."""
        if self._is_array_stream and not self._fetched:
            self.stream.order_ahead()

    @property
    def is_between_batches(self) -> bool:
        """Whether no fetched item is uncommitted."""
        return not self._fetched

    def position(self) -> Json:
        """Returns the position after the last committed item; None if unknown."""
        return self._position if self._fetched else self.stream_position()

    def stream_position(self) -> Json:
        """Returns the position after the last fetched item; None if unknown."""
        return self.stream.get_state() if hasattr(self.stream, "get_state") else None

    def examples(self, item: PyTree) -> PyTree:
        """Returns the batch of a fetched item."""
        return self.stream.pick(item) if self.takes_rows else item

    def whole(self) -> PyTree:
        """Returns all examples as one batch; None if the stream cannot give them."""
        return self.stream.whole() if hasattr(self.stream, "whole") else None


def _make_read_only(item: PyTree) -> None:
    """Marks the new arrays of an item as read-only, so that strategies need not copy them."""
    with contextlib.suppress(ValueError):  # JAX sorts the keys of a dict; some cannot be compared.
        for leaf in jax.tree.leaves(item):
            if isinstance(leaf, np.ndarray) and leaf.base is None:
                leaf.flags.writeable = False
