"""Interrupts: holds Ctrl-C back while the loop is between a batch and the state it leads to."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Interrupts:
    """Defers the first SIGINT that arrives during `held()`; a second one is passed on at once.

    Only the main thread's handler is replaced, only within `watched()`, and only if it is a
    Python function (so that `SIG_IGN` and foreign handlers stay in force).
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._held = False
        self._pending = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """The span in which `held()` has an effect."""
        present = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or not callable(present) or present == self._on_signal:
            yield
            return
        self._handler = present
        try:
            signal.signal(signal.SIGINT, self._on_signal)
            yield
        finally:
            signal.signal(signal.SIGINT, present)

    def hold(self) -> None:
        """Begins a stretch that must not be torn apart."""
        self._held = True

    def release(self) -> None:
        """Ends it; an interrupt that has arrived meanwhile takes effect now."""
        self._held = False
        if self._pending:
            self._pending = False
            self._handler(signal.SIGINT, None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._held and not self._pending:
            self._pending = True
        else:
            self._pending = False
            self._handler(number, frame)
