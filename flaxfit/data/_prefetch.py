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
from flaxfit.tree._types import Data, Json, PyTree


def prefetch(stream: Data, n: int = 2) -> "PrefetchedStream":
    """Assembles the batches of a stream ahead, in a background thread.

    The position is that of the last *delivered* batch. At most `n` batches wait in memory, none
    before the second batch is requested. An exception of the stream is raised by `next`, with its
    own traceback. The thread ends with the data, with `close()`, or with the prefetched stream.

    >>> list(prefetch(range(3)))
    [0, 1, 2]

    Args:
      stream: a stream, or anything else that `as_stream` takes.
      n: the number of batches that may wait.
    """
    if n < 1:
        raise ValueError(f"Cannot assemble {n} batches ahead: n must be 1 or more.")
    return PrefetchedStream(as_stream(stream), n)


class PrefetchedStream:
    """A stream whose batches a background thread assembles ahead; see `prefetch`."""

    def __init__(self, stream: Any, n: int):
        self._stream = stream
        self._n = n
        self.name = getattr(stream, "name", type(stream).__name__)
        self.shared = is_shared(stream)
        self._closed = False
        self._batches: queue.SimpleQueue | None = None  # No thread before the second batch.
        self._is_begun = False
        self._halt: Callable[[], object] = lambda: None
        self._state, self.epoch = _position(stream)

    def __len__(self) -> int:
        """The number of batches in an epoch, if the stream knows it."""
        return len(self._stream)

    @property
    def batch_size(self) -> int:
        """The size of its regular batches; 0 if the stream does not know it."""
        return getattr(self._stream, "batch_size", 0)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PyTree:
        if self._closed:
            raise ValueError("This prefetched stream was closed: make a new one.")
        if not self._is_begun:
            # Nothing is read ahead of the first batch: `set_state` may then continue after it
            # without opening the data again, which may change its order.
            try:
                batch = _next(self._stream)
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
        """All examples as one batch; None if the stream cannot give them."""
        return self._stream.whole() if hasattr(self._stream, "whole") else None

    def one_epoch(self) -> "PrefetchedStream":
        """A fresh prefetched stream of one pass over the same data."""
        return PrefetchedStream(one_pass(self._stream), self._n)

    def passes(self, epochs: int | None, **options: Any) -> "PrefetchedStream":
        """A fresh prefetched stream of passes over the same data."""
        return PrefetchedStream(self._stream.passes(epochs, **options), self._n)

    def get_state(self) -> Json:
        """The position after the last delivered batch."""
        return self._state

    def set_state(self, state: Json) -> None:
        """Moves to a position that `get_state` gave; batches assembled ahead are dropped."""
        self._halt()
        self._batches, self._is_begun = None, False
        self._stream.set_state(state)
        self._state, self.epoch = _position(self._stream)

    def close(self) -> None:
        """Ends the thread after its present batch, and the stream."""
        self._halt()
        self._closed = True

    def _start(self) -> queue.SimpleQueue:
        batches, self._slots = queue.SimpleQueue(), threading.Semaphore(self._n)
        stopped = threading.Event()
        # The thread does not refer to this object, whose collection can thus stop it.
        arguments = (self._stream, batches, self._slots, stopped)
        thread = threading.Thread(target=_assemble, args=arguments, daemon=True)
        self._halt = weakref.finalize(self, _stop, thread, self._slots, stopped)
        thread.start()
        return batches


def _assemble(
    stream: Any, batches: queue.SimpleQueue, slots: threading.Semaphore, stopped: threading.Event
) -> None:
    while slots.acquire() and not stopped.is_set():
        try:
            batches.put((_next(stream), None, _position(stream)))
        except BaseException as error:  # Raised by `next`.
            batches.put((None, error, _position(stream)))
            return


def _next(stream: Any) -> PyTree:
    """The next batch; the stream itself does not write to its arrays afterwards."""
    return next(stream) if type(stream) is ArrayStream else detached(next(stream))


def _stop(thread: threading.Thread, slots: threading.Semaphore, stopped: threading.Event) -> None:
    stopped.set()
    slots.release()
    # With a time limit, because a stream may hang, or wait for the thread that collects garbage.
    if thread is not threading.current_thread():
        thread.join(timeout=5.0)


def _position(stream: Any) -> tuple[Json, int]:
    state = stream.get_state() if hasattr(stream, "get_state") else None
    return state, getattr(stream, "epoch", 0)
