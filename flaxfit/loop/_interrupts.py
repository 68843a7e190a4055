"""Interrupts: defers Ctrl-C while the loop is between a batch and the state that follows."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Self

Handler = Callable[[int, FrameType | None], object]


class Interrupts(threading.local):
    """Defers the first SIGINT that arrives while they are held; a second one is passed on at once.

    The handler is replaced within a `with` over this, in the main thread only, and only if it is a
    Python function, so that `SIG_IGN` and foreign handlers stay in force. Each thread has its own:
    an interrupt is the main thread's, whatever the others hold, and only that one restores the
    handler.
    """

    def __init__(self) -> None:
        self._handler: Handler = signal.default_int_handler
        self._replaced: list[Handler | None] = []
        self.is_held = False
        """Whether interrupts are deferred; code that sets it calls `release` afterwards."""
        self.is_pending = False
        """Whether a deferred interrupt has arrived."""

    def __enter__(self) -> Self:
        # Not a generator, which takes longer: each checkpoint enters it.
        present = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        handler = present if is_main and callable(present) else None
        handler = None if handler == self._on_signal else handler
        self._replaced.append(handler)
        try:
            if handler is not None:
                self._handler = handler
                signal.signal(signal.SIGINT, self._on_signal)
            return self
        except BaseException:  # An interrupt that came just now.
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        present = self._replaced.pop()
        if present is not None:
            signal.signal(signal.SIGINT, present)

    def release(self) -> None:
        """Stops deferring; an interrupt that has arrived takes effect now."""
        self.is_held = False
        if self.is_pending:
            self.is_pending = False
            self._handler(signal.SIGINT, None)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Defers interrupts within: calls of compiled functions may turn them into other errors."""
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
