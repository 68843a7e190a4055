"""Timer: ends training when a budget of time or of steps is used up."""

import time
from collections.abc import Callable, Mapping

from flaxfit.display import duration, plural
from flaxfit.loop import TrainLoop
from flaxfit.state import Checkpoint
from flaxfit.tree import Json


class Timer:
    """Ends training within one step of the end of a budget, with a checkpoint.

    Time counts from when it is given to a loop and includes compilation, evaluation, your own
    code, and the time that earlier parts of a resumed `fit` have used. The last checkpoint has
    `stop=True`.

    >>> callbacks = [Timer(seconds=8 * 3600), Timer(n_steps=100_000)]

    Args:
      seconds: the seconds that training may take.
      n_steps: the steps that it may take.
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
        self._budget = {"seconds": seconds, "n_steps": n_steps}
        self._clock = clock
        self._loop: TrainLoop | None = None
        self._began = self._now(0)
        """The time and the step at which nothing was used."""

    def attach(self, loop: TrainLoop) -> None:
        """Starts to count."""
        self._loop = loop
        self._began = self._now(loop.step)
        by_step = self._budget["n_steps"] is not None
        watchers = loop.on.after_step if by_step else loop.on.after_dispatch
        watchers.append(self._watch)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the checkpoint, with `stop` set when the budget is used up."""
        return checkpoint.replace(stop=True) if self._is_over(checkpoint.step) else checkpoint

    @property
    def endings(self) -> list[str]:
        """Messages: why it stopped training."""
        if self._loop is None or not self._is_over(self._loop.step):
            return []
        seconds, n_steps = self._budget["seconds"], self._budget["n_steps"]
        parts = [] if seconds is None else [duration(seconds)]
        parts += [] if n_steps is None else [plural(n_steps, "step")]
        return [f"the budget of {' or '.join(parts)} is used up"]

    def get_state(self) -> dict[str, Json]:
        return {**self._used_at(self._step), "endings": self.endings}

    def set_state(self, state: Mapping[str, Json]) -> None:
        """Counts the budget that was used before a resume; call it after `attach`."""
        self._began = {name: now - state[name] for name, now in self._now(self._step).items()}

    @property
    def _step(self) -> int:
        return 0 if self._loop is None else self._loop.step

    def _now(self, step: int) -> dict[str, float]:
        return {"seconds": self._clock(), "n_steps": step}

    def _watch(self, step: int) -> None:
        if self._loop is not None and self._is_over(step):
            self._loop.finish()

    def _is_over(self, step: int) -> bool:
        used = self._used_at(step)
        return any(n is not None and used[name] >= n for name, n in self._budget.items())

    def _used_at(self, step: int) -> dict[str, float]:
        return {name: now - self._began[name] for name, now in self._now(step).items()}
