"""Timer: ends training when a budget of time or of steps is used up."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from flaxfit.callbacks._callback import Loop
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.tree._types import Json


class Timer:
    """Ends training within one step of the end of a budget, with a checkpoint.

    Time counts from when it is given to a loop: compilation, evaluation and your own code are in
    it, and what earlier parts of a resumed `fit` have used. The last checkpoint has `stop=True`.

    >>> callbacks = [Timer(seconds=8 * 3600), Timer(n_steps=100_000)]

    Args:
      seconds: how long training may take.
      n_steps: how many steps it may take.
      clock: gives the time in seconds.
    """

    borrows = True

    def __init__(
        self,
        seconds: float | None = None,
        n_steps: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if seconds is None and n_steps is None:
            raise ValueError("Timer needs a budget: pass seconds= or n_steps=, or both.")
        if (seconds is not None and seconds <= 0) or (n_steps is not None and n_steps < 1):
            raise ValueError(
                f"Timer needs a positive budget, got seconds={seconds}, n_steps={n_steps}."
            )
        self._seconds, self._n_steps, self._clock = seconds, n_steps, clock
        self._loop: Any = None
        self._used = {"seconds": 0.0, "n_steps": 0}
        self._began, self._first_step = clock(), 0

    def attach(self, loop: Loop) -> None:
        """Begins to count."""
        self._loop = loop
        self._used = {"seconds": 0.0, "n_steps": 0}
        self._began, self._first_step = self._clock(), loop.step
        watchers = loop.dispatch_watchers if self._n_steps is None else loop.watchers
        watchers.append(self._watch)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint, with `stop` set when the budget is used up."""
        return checkpoint.replace(stop=True) if self._is_over(checkpoint.step) else checkpoint

    def get_state(self) -> dict[str, Json]:
        """Returns what a resumed run needs, as plain JSON."""
        return self._used_at(self._loop.step if self._loop is not None else self._first_step)

    def set_state(self, state: Mapping[str, Json]) -> None:
        """Restores what `get_state` returned; call it after `attach`."""
        self._used = dict(state)

    def _watch(self, step: int) -> None:
        if self._is_over(step):
            self._loop.finish()

    def _is_over(self, step: int) -> bool:
        used = self._used_at(step)
        budget = {"seconds": self._seconds, "n_steps": self._n_steps}
        return any(limit is not None and used[name] >= limit for name, limit in budget.items())

    def _used_at(self, step: int) -> dict[str, Any]:
        return {
            "seconds": self._used["seconds"] + self._clock() - self._began,
            "n_steps": self._used["n_steps"] + step - self._first_step,
        }
