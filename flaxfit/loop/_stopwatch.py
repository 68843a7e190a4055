"""Stopwatch: adds up the seconds that are spent within it."""

import time
from typing import Self


class Stopwatch:
    """Adds up the seconds of all `with` blocks over it, the present one included.

    >>> watch = Stopwatch()
    >>> with watch:
    ...     watch.is_running
    True
    >>> watch.is_running, watch.seconds >= 0
    (False, True)
    """

    def __init__(self) -> None:
        self.is_running = False
        self._seconds = self._began = 0.0

    def __enter__(self) -> Self:
        self._began, self.is_running = time.perf_counter(), True
        return self

    def __exit__(self, *error: object) -> None:
        self._seconds, self.is_running = self.seconds, False

    @property
    def seconds(self) -> float:
        """The seconds since the latest reset."""
        return self._seconds + (time.perf_counter() - self._began) * self.is_running

    def reset(self) -> None:
        """Restarts at 0, also within a block."""
        self._seconds, self._began = 0.0, time.perf_counter()
