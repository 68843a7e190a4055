"""Later: a value that is made only if it is asked for, of things that may soon be gone."""

import threading
from collections.abc import Callable
from typing import Any


class Later:
    """Makes its value in two parts, each once: what saves it from being lost, and what ends it.

    >>> numbers = [1, 2]
    >>> later = Later(lambda: (copy := list(numbers), lambda: sum(copy))[1])
    >>> later.secure()
    >>> numbers.clear()
    >>> later.value
    3

    Args:
      begin: takes what is needed, and returns a function that makes the value of it.
    """

    def __init__(self, begin: Callable[[], Callable[[], Any]]):
        self._begin: Callable[[], Callable[[], Any]] | None = begin
        self._end: Callable[[], Any] | None = None
        self._value: Any = None
        # A thread may ask for it just when another one uses up what it is made of.
        self._lock = threading.Lock()

    def secure(self) -> None:
        """Takes what the value is made of: from here on, that may change."""
        with self._lock:
            self._secure()

    def _secure(self) -> None:
        if self._begin is not None:
            self._begin, self._end = None, self._begin()

    @property
    def value(self) -> Any:
        """The value, which is made when it is asked for first."""
        with self._lock:
            self._secure()
            if self._end is not None:
                self._end, self._value = None, self._end()
            return self._value
