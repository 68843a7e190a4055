"""PassBar: shows the progress and the result of `evaluate` or `predict`."""

import time
from collections.abc import Callable, Mapping
from typing import Self

from flaxfit import display
from flaxfit.callbacks._bar import Bar, draw, new_bar
from flaxfit.callbacks._progress import SECONDS_BETWEEN_REFRESHES


class PassBar:
    """Counts the batches of one pass, and draws a bar on a terminal or in a notebook."""

    def __init__(
        self,
        label: str,
        total: int | None,
        verbose: int | str,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if verbose not in ("auto", 0, 1, 2):
            raise ValueError(f"verbose must be 'auto', 0, 1 or 2, got {verbose!r}.")
        self.n = 0
        """The number of batches so far."""
        self._label, self._total, self._clock = label, total, clock
        self._stream = display.output()
        self._is_live = verbose in ("auto", 1) and display.is_live(self._stream)
        self._has_line = verbose in (1, 2)
        self._began = clock()
        self._next_refresh = self._began + SECONDS_BETWEEN_REFRESHES
        self._first: tuple[int, float] | None = None
        """The first batch after compilation, and its time."""
        self._bar: Bar | None = None

    def __call__(self, n: int) -> None:
        """Updates the number of completed batches, and redraws the bar if that is due."""
        self.n = n
        if not self._is_live:
            return
        now = self._clock()
        self._first = self._first or (n, now)
        if now < self._next_refresh:
            return
        if self._bar is None:  # Not `or`: a bar without a total has no truth value.
            self._bar = new_bar(self._stream, self._total)
        (before, since), speed = self._first, None
        if n > before:
            speed = (n - before) / (now - since)
        draw(self._bar, self._stream, self._label, n, self._total, speed=speed, metrics={})
        self._next_refresh = self._clock() + SECONDS_BETWEEN_REFRESHES

    def finish(self, metrics: Mapping[str, float]) -> None:
        """Writes the final line, and a notice if there were fewer batches than expected."""
        if self._total is not None and self.n < self._total:
            display.say(f"the data ended after {self.n:,} of {self._total:,} steps")
        if self._has_line:
            self._close()
            seconds = self._clock() - self._began
            label = f"{self._label}  {display.plural(self.n, 'step')}"
            display.write(display.pass_line(label, seconds, metrics), self._stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def _close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()
