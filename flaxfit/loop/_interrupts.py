"""Interrupts: defers Ctrl-C between fetching a batch and storing the state of its step."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Self

Handler = Callable[[int, FrameType | None], object]


class Interrupts(threading.local):
    """Defers the first SIGINT while `is_held`; a second one is passed on at once.

    Within a `with` block it replaces the handler, only in the main thread and only if that is a
    Python function, so that `SIG_IGN` and handlers of C code stay in force. It is thread-local,
    because signals arrive in the main thread, whatever other threads hold.
    """

    def __init__(self) -> None:
        self._handler: Handler = signal.default_int_handler
        self._replaced: list[Handler | None] = []
        self.is_held = False
        """Whether to defer interrupts; code that sets it must call `release` afterwards."""
        self.is_pending = False
        """Whether an interrupt is deferred."""

    def __enter__(self) -> Self:
        # Not a `contextmanager`, which is slower: each checkpoint enters this.
        present = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        handler = present if is_main and callable(present) else None
        handler = None if handler == self._on_signal else handler
        # Recorded first, so that `__exit__` restores it if an interrupt arrives in the `try`.
        self._replaced.append(handler)
        try:
            if handler is not None:
                self._handler = handler
                signal.signal(signal.SIGINT, self._on_signal)
            return self
        except BaseException:  # An interrupt arrived during the replacement.
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        present = self._replaced.pop()
        if present is not None:
            signal.signal(signal.SIGINT, present)

    def release(self) -> None:
        """Stops deferring, and delivers a pending interrupt now."""
        self.is_held = False
        if self.is_pending:
            self.is_pending = False
            self._handler(signal.SIGINT, None)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Defers interrupts in a `with` block: compiled calls may turn them into other errors."""
        with self:
            was_held, self.is_held = self.is_held, True
            try:
                yield
            finally:
                if not was_held:
                    self.release()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_held and not self.is_pending:
            self.is_pending = True
        else:
            self.is_pending = False
            self._handler(number, frame)
