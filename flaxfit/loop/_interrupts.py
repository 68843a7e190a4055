"""Interrupts: defers Ctrl-C while the loop is between a batch and the state that follows."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self


class Interrupts:
    """Defers the first SIGINT that arrives while it holds them; a second one is passed on at once.

    Only the main thread's handler is replaced, only in a `with` over this, and only if it is a
    Python function (so that `SIG_IGN` and foreign handlers stay in force).
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._replaced: list[Any] = []
        self.is_held = False
        """Whether interrupts are deferred; set directly by an inner loop, which then releases."""
        self.is_pending = False
        """Whether a deferred interrupt has arrived."""

    def __enter__(self) -> Self:
        # Not by a generator, which takes longer, as each checkpoint has its span.
        present = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        is_replaced = is_main and callable(present) and present != self._on_signal
        self._replaced.append(present if is_replaced else None)
        try:
            if is_replaced:
                self._handler = present
                signal.signal(signal.SIGINT, self._on_signal)
            return self
        except BaseException:  # An interrupt that came just now.
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        present = self._replaced.pop()
        if present is not None:
            signal.signal(signal.SIGINT, present)

    def hold(self) -> None:
        """Defers interrupts from here on."""
        self.is_held = True

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
