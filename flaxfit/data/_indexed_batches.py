"""Batches by index, such as a Keras PyDataset, in an order that depends on seed and epoch."""

import sys
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from flaxfit.data._batch import detached
from flaxfit.data._libraries import comes_from
from flaxfit.tree import Data, Json, PyTree


def is_indexed(data: Data) -> bool:
    """Returns whether data gives batches by index: a Keras PyDataset, or `__getitem__`, `__len__`.

    Data with its own `__iter__` is iterated over, unless it has `on_epoch_end`.
    """
    if isinstance(data, list | tuple | type):
        return False
    of_keras = comes_from(data, "keras")
    if not hasattr(data, "__getitem__") or not (hasattr(data, "__len__") or of_keras):
        return False
    return of_keras or hasattr(data, "on_epoch_end") or not hasattr(data, "__iter__")


def n_batches(data: Data) -> int:
    """Returns the number of batches in a pass; without a length, `sys.maxsize` (endless)."""
    try:
        return len(data)
    except TypeError:
        return sys.maxsize


class IndexedBatches:
    """Opens passes over batches by index, and calls the data's hooks at their begin and end.

    The order of an epoch is `np.random.default_rng((seed, epoch)).permutation(n)` if it is
    shuffled, where `n` is the length of the data when the pass begins.
    """

    def __init__(self, data: Any, *, shuffle: bool, seed: int):
        self.data, self._shuffle, self._seed = data, shuffle, seed
        n, n_ahead = (getattr(data, name, 0) for name in ("workers", "max_queue_size"))
        self.n_threads = n if isinstance(n, int) and n > 1 else 1
        """The number of reading threads, a PyDataset's `workers`."""
        self.n_ahead = max(self.n_threads, n_ahead if isinstance(n_ahead, int) else 0)
        """The maximum number of batches to read ahead."""
        self.n_ended = 0
        """The number of calls of `on_epoch_end`."""
        self._is_begun = False

    def __call__(self, epoch: int) -> "IndexedPass":
        """Opens the pass of an epoch."""
        return IndexedPass(self, epoch)

    def order(self, epoch: int) -> Sequence[int]:
        """Returns the order of the batch indices in an epoch."""
        n = n_batches(self.data)
        if not self._shuffle:
            return range(n)
        if n == sys.maxsize:
            raise ValueError(
                f"shuffle=True needs the number of batches, but this {type(self.data).__name__} "
                "has no length: give it __len__, or leave shuffle out."
            )
        return np.random.default_rng((self._seed, epoch)).permutation(n).tolist()

    def begin_pass(self) -> None:
        """Calls `on_epoch_begin`, unless a peek at the data has called it for this pass."""
        if not self._is_begun:
            self._is_begun = True
            _call(self.data, "on_epoch_begin")

    def end_pass(self) -> None:
        """Calls `on_epoch_end`."""
        self._is_begun = False
        self.n_ended += 1
        _call(self.data, "on_epoch_end")


class IndexedPass(Iterator[PyTree]):
    """One pass over batches by index, with a position.

    `on_epoch_begin` is called before the first batch is read and `on_epoch_end` after the last.
    Reading ahead calls them early, but always once per pass. Several threads keep the order, and
    batches read ahead are not part of the position.
    """

    def __init__(self, batches: IndexedBatches, epoch: int):
        self._batches, self._epoch = batches, epoch
        self._n_read = 0
        self._order: Sequence[int] | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[PyTree]] = deque()

    def __next__(self) -> PyTree:
        if self._order is None:
            self._batches.begin_pass()
            self._order = self._batches.order(self._epoch)
        if self._n_read >= len(self._order):
            raise StopIteration
        batch = self._read(self._order)
        self._n_read += 1
        if self._n_read == len(self._order):
            batch = detached(batch)  # The data may now shuffle its arrays in place.
            self._batches.end_pass()
        return batch

    def _read(self, order: Sequence[int]) -> PyTree:
        """Returns the next batch; threads read later batches ahead."""
        read = self._batches.data.__getitem__
        if self._batches.n_threads == 1:
            return read(order[self._n_read])
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._batches.n_threads, "flaxfit-read")
            # An abandoned pass (one that fetches only the first batch, say) stops reading.
            weakref.finalize(self, self._threads.shutdown, wait=False, cancel_futures=True)
        done = self._n_read + len(self._ahead)
        for index in order[done : self._n_read + self._batches.n_ahead]:
            self._ahead.append(self._threads.submit(read, index))
        try:
            batch = self._ahead.popleft().result()
        except BaseException:
            self._end_threads()  # The next call reads this batch again.
            raise
        if not self._ahead:
            self._end_threads()
        return batch

    def _end_threads(self) -> None:
        threads, self._threads = self._threads, None
        self._ahead.clear()
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def get_state(self) -> dict[str, Json]:
        """Returns the number of batches read, and of calls of `on_epoch_end`."""
        return {"batch": self._n_read, "ended": self._batches.n_ended}

    def set_state(self, state: dict[str, Json]) -> None:
        """Moves to a position; calls the data's hooks for earlier passes that it has missed."""
        while self._batches.n_ended < state["ended"]:
            self._batches.begin_pass()
            self._batches.end_pass()
        self._n_read = state["batch"]
        # At the end of a pass, do not begin the next one yet.
        is_over = self._n_read >= n_batches(self._batches.data)
        self._order = [] if is_over else None


def _call(data: Any, name: str) -> None:
    if callable(function := getattr(data, name, None)):
        function()
