"""Stopwatch: adds up the seconds spent in its `with` blocks."""

import time
from typing import Self


class Stopwatch:
    """Adds up the seconds of all its `with` blocks, including a running one; blocks may nest.

    >>> watch = Stopwatch()
    >>> with watch:
    ...     watch.is_running
    True
    >>> watch.is_running, watch.seconds >= 0
    (False, True)
    """

    def __init__(self) -> None:
        self._depth = 0
        self._seconds = self._began = 0.0

    def __enter__(self) -> Self:
        if not self._depth:
            self._began = time.perf_counter()
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._seconds += time.perf_counter() - self._began

    @property
    def is_running(self) -> bool:
        """Whether a block is running."""
        return self._depth > 0

    @property
    def seconds(self) -> float:
        """The seconds since the latest reset."""
        return self._seconds + (time.perf_counter() - self._began) * self.is_running

    def reset(self) -> None:
        """Restarts at 0, also within a block."""
        self._seconds, self._began = 0.0, time.perf_counter()
