"""prefetch: batches assembled ahead by a background thread."""

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Self

from flaxfit.data._adapters import as_stream, one_pass
from flaxfit.data._arrays import ArrayStream
from flaxfit.data._batch import detached
from flaxfit.data._stream import is_shared
from flaxfit.tree._types import Json, PyTree


def prefetch(stream: Any, n: int = 2) -> "PrefetchedStream":
    """Assembles the batches of a stream ahead, in a background thread.

    The position is that of the last *delivered* batch. At most `n` batches wait in memory, none
    before the second batch is asked for. What the stream raises is raised by `next`, with its own
    traceback. The thread ends with the data, with `close()`, and with the prefetched stream itself.

    >>> list(prefetch(range(3)))
    [0, 1, 2]

    Args:
      stream: a stream, or anything else that `as_stream` takes.
      n: how many batches may wait.
    """
    if n < 1:
        raise ValueError(f"Cannot assemble {n} batches ahead: n must be 1 or more.")
    return PrefetchedStream(as_stream(stream), n)


class PrefetchedStream:
    """A stream whose batches a background thread assembles ahead; see `prefetch`.

    Attributes:
      epoch: how many passes were complete when the last batch was delivered.
      name: what messages call the data.
      shared: whether the batches are the same in every process.
    """

    def __init__(self, stream: Any, n: int):
        self._stream = stream
        self._n = n
        self.name = getattr(stream, "name", type(stream).__name__)
        self.shared = is_shared(stream)
        self._closed = False
        self._batches: PyTree = None  # There is no thread before the second batch is asked for.
        self._is_begun = False
        self._halt: Callable[[], Any] = lambda: None
        self._state, self.epoch = _position(stream)

    def __len__(self) -> int:
        """The number of batches in an epoch, where the stream knows it."""
        return len(self._stream)

    @property
    def batch_size(self) -> int:
        """The size of its regular batches, where the stream knows it; else 0."""
        return getattr(self._stream, "batch_size", 0)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise ValueError("This prefetched stream was closed: make a new one.")
        if not self._is_begun:
            # Nothing is read ahead of a first batch: `set_state` may continue right after it,
            # and need not open the data again, which may change its order.
            try:
                batch = next(self._stream)
            finally:
                self._state, self.epoch = _position(self._stream)
            self._is_begun = True
            return batch
        if self._batches is None:
            self._batches = self._start()
        batch, error, position = self._batches.get()
        self._slots.release()
        self._state, self.epoch = position
        if error is not None:
            self._halt()
            self._batches = None
            raise error
        return batch

    def whole(self) -> PyTree:
        """All examples as one batch, where the stream can give them; else None."""
        return self._stream.whole() if hasattr(self._stream, "whole") else None

    def one_epoch(self) -> "PrefetchedStream":
        """A fresh prefetched stream of one pass over the same data."""
        return PrefetchedStream(one_pass(self._stream), self._n)

    def passes(self, epochs: int | None, **options: Any) -> "PrefetchedStream":
        """A fresh prefetched stream of passes over the same data, where the stream makes such."""
        return PrefetchedStream(self._stream.passes(epochs, **options), self._n)

    def get_state(self) -> Json:
        """The position after the last delivered batch."""
        return self._state

    def set_state(self, state: PyTree) -> None:
        """Moves to a position that `get_state` gave; what was assembled ahead is dropped."""
        self._halt()
        self._batches, self._is_begun = None, False
        self._stream.set_state(state)
        self._state, self.epoch = _position(self._stream)

    def close(self) -> None:
        """Ends the thread, after the batch that it is at; the stream gives no more batches."""
        self._halt()
        self._closed = True

    def _start(self) -> queue.SimpleQueue:
        batches, self._slots = queue.SimpleQueue(), threading.Semaphore(self._n)
        stopped = threading.Event()
        # The thread knows nothing of this object, which can thus be collected and stop it.
        arguments = (self._stream, batches, self._slots, stopped)
        thread = threading.Thread(target=_assemble, args=arguments, daemon=True)
        self._halt = weakref.finalize(self, _stop, thread, self._slots, stopped)
        thread.start()
        return batches


def _assemble(
    stream: Any, batches: queue.SimpleQueue, slots: threading.Semaphore, stopped: threading.Event
) -> None:
    # Of arrays each batch is made for itself.
    keep = (lambda item: item) if isinstance(stream, ArrayStream) else detached
    while slots.acquire() and not stopped.is_set():
        try:
            batches.put((keep(next(stream)), None, _position(stream)))
        except BaseException as error:  # Whatever it is, it is raised where the batch is wanted.
            batches.put((None, error, _position(stream)))
            return


def _stop(thread: threading.Thread, slots: threading.Semaphore, stopped: threading.Event) -> None:
    stopped.set()
    slots.release()
    # Bounded, because a stream may hang, or wait for the very thread that collects garbage here.
    if thread is not threading.current_thread():
        thread.join(timeout=5.0)


def _position(stream: Any) -> tuple[Any, int]:
    state = stream.get_state() if hasattr(stream, "get_state") else None
    return state, getattr(stream, "epoch", 0)
