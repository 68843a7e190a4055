"""prefetch: batches assembled ahead by a background thread."""

import contextlib
import contextvars
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Self

from flaxfit.data._adapters import as_stream, one_pass
from flaxfit.data._arrays import ArrayStream
from flaxfit.data._batch import detached
from flaxfit.data._iterables import IterableStream
from flaxfit.data._stream import is_shared
from flaxfit.tree import Data, Json, PyTree

_END, _PAUSE = "end", "pause"


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
    """A stream that a background thread reads ahead; see `prefetch`."""

    def __init__(self, stream: Any, n: int):
        self._stream = stream
        self._n = n
        self.name: str = getattr(stream, "name", type(stream).__name__)
        self.shared: bool = is_shared(stream)
        self.batch_size: int = getattr(stream, "batch_size", 0)
        """The size of its regular batches; 0 if the stream does not know it."""
        self._closed = False
        # One thread does everything with the stream: sources such as SQLite reject other threads.
        self._requests: queue.SimpleQueue = queue.SimpleQueue()
        self._results = queue.SimpleQueue()
        self._n_due = 0
        self._is_begun = False
        self._halt: weakref.finalize | None = None
        self.epoch: int
        """The number of complete passes, as of the last delivered batch."""
        self._state, self.epoch = _position(stream)

    def __len__(self) -> int:
        """Returns the number of batches in an epoch, if the stream knows it."""
        return len(self._stream)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PyTree:
        if self._closed:
            raise ValueError("This prefetched stream was closed: make a new one.")
        # Read nothing ahead of the first batch: `set_state` may then continue after that batch
        # without reopening the data, which may change its order.
        self._request(self._n if self._is_begun else 1)
        batch = self._result()
        if self._is_begun:
            self._request(self._n)
        self._is_begun = True
        return batch

    def whole(self) -> PyTree:
        """Returns all examples as one batch, or None if the stream cannot."""
        return self._stream.whole() if hasattr(self._stream, "whole") else None

    def one_epoch(self) -> "PrefetchedStream":
        """Returns a fresh prefetched stream of one pass over the same data."""
        return PrefetchedStream(one_pass(self._stream), self._n)

    def passes(self, epochs: int | None, **options: Any) -> "PrefetchedStream":
        """Returns a fresh prefetched stream of passes over the same data."""
        return PrefetchedStream(self._stream.passes(epochs, **options), self._n)

    def get_state(self) -> Json:
        """Returns the position after the last delivered batch."""
        return self._state

    def set_state(self, state: Json) -> None:
        """Moves to a position that `get_state` gave; drops batches read ahead."""
        _drop(self._requests)
        self._results, self._n_due, self._is_begun = queue.SimpleQueue(), 0, False
        context = contextvars.copy_context()  # Of this thread, which may have turned notices off.
        self._request(1, lambda stream: context.run(stream.set_state, state))
        self._result()

    def close(self) -> None:
        """Ends the thread after its current batch, and closes the stream."""
        if self._halt is not None:
            self._halt()
        self._halt, self._closed = None, True

    def _request(self, n_due: int, act: Callable[[Any], PyTree] | None = None) -> None:
        """Requests batches until `n_due` are due, or a call of `act` on the stream."""
        if self._halt is None:
            # The thread has no reference to this object, so that its collection can stop it.
            arguments = (self._stream, self._requests)
            self._thread = threading.Thread(target=_serve, args=arguments, daemon=True)
            self._halt = weakref.finalize(self, _stop, self._thread, self._requests)
            self._thread.start()
        for _ in range(n_due - self._n_due):
            self._requests.put((act or _next, self._results))
        self._n_due = max(n_due, self._n_due)

    def _result(self) -> PyTree:
        """Returns the next result of the thread; an error ends the thread."""
        result, error, position = self._results.get()
        self._n_due -= 1
        self._state, self.epoch = position
        if error is not None and self._halt is not None:
            self._halt.detach()
            _stop(self._thread, self._requests, _PAUSE)
            self._halt, self._n_due = None, 0
        if error is not None:
            raise error
        return result


def _serve(stream: Any, requests: queue.SimpleQueue) -> None:
    has_failed = False
    while isinstance(request := requests.get(), tuple):
        act, results = request
        if has_failed and act is _next:  # Requested before `next` has raised the error.
            continue
        result, error = None, None
        try:
            result = act(stream)
        except BaseException as raised:  # Raised by `next`.
            error = raised
        has_failed = error is not None
        # The position travels with its batch: the stream is ahead of what `next` has delivered.
        results.put((result, error, _position(stream)))
    if request == _END and isinstance(stream, IterableStream):
        stream.close()


def _next(stream: Any) -> PyTree:
    """Returns the next batch, copied unless it is known that nothing writes to it later."""
    return next(stream) if type(stream) is ArrayStream else detached(next(stream))


def _drop(requests: queue.SimpleQueue) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            requests.get_nowait()


def _stop(thread: threading.Thread, requests: queue.SimpleQueue, last: str = _END) -> None:
    _drop(requests)
    requests.put(last)
    # With a timeout: the stream may hang, or wait for this thread, which may be in a finalizer.
    if thread is not threading.current_thread():
        thread.join(timeout=5.0)


def _position(stream: Any) -> tuple[Json, int]:
    state = stream.get_state() if hasattr(stream, "get_state") else None
    return state, getattr(stream, "epoch", 0)
