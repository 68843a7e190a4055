"""Schedules: `every`, `at` and `when` run a callback at some of the checkpoints."""

import time
from collections.abc import Callable
from typing import Any

from flaxfit.callbacks._callback import Callback
from flaxfit.distributed._processes import from_main
from flaxfit.state._checkpoint import Checkpoint


class Scheduled:
    """A callback that passes some checkpoints on to another one; see `every`, `at` and `when`."""

    def __init__(self, is_due: Callable[[Checkpoint], Any], callback: Callback, owner: str) -> None:
        if not callable(callback):
            raise TypeError(f"{owner} needs a callable of a checkpoint, got {callback!r}.")
        self._is_due = is_due
        self._callback = callback
        # As of a function that is wrapped: what it remembers is saved by its own name.
        self.__wrapped__ = callback

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """What the callback makes of the checkpoint, or the checkpoint itself."""
        if not self._is_due(checkpoint):
            return checkpoint
        changed = self._callback(checkpoint)
        return checkpoint if changed is None else changed

    def __getattr__(self, name: str) -> Any:
        """What else the callback has (attach, close, get_state, ...) and only that.

        Names with an underscore are its own business, and would recurse in a copy.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._callback, name)


def every(
    n: int | None = None,
    callback: Callback | None = None,
    *,
    seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Any:
    """Runs a callback every `n` steps: at checkpoints whose step is divisible by `n`.

    Where a multiple of `n` is no checkpoint, at the next one after it. With `seconds`, at the first
    checkpoint and then when so many have passed since it last ran. Other checkpoints pass
    unchanged. The loop decides where checkpoints are: `first_checkpoint=n_steps_per_checkpoint`
    puts them at multiples. Without a callback it is a decorator: `every(10)(callback)`.

    >>> steps = []
    >>> callback = every(10, lambda checkpoint: steps.append(checkpoint.step))
    >>> for step in range(0, 30, 5):
    ...     checkpoint = callback(Checkpoint(step=step, state=None, metrics={}))
    >>> steps
    [0, 10, 20]
    """
    if (n is None) == (seconds is None):
        raise ValueError(f"every needs either n or seconds, got n={n} and seconds={seconds}.")
    if seconds is not None:
        if seconds <= 0:
            raise ValueError(f"every needs a positive number of seconds, got {seconds}.")
        return _scheduled(_Elapsed(seconds, clock), callback, "every")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"every needs a number of steps of at least 1, got {n!r}.")
    return _scheduled(
        lambda checkpoint: _n_before(checkpoint) // n < checkpoint.step // n, callback, "every"
    )


def at(*steps: int) -> Callable[[Callback], Callback]:
    """Makes a decorator: its callback runs only at the checkpoints of these steps.

    Where a step is none of a checkpoint, at the next checkpoint after it.

    >>> steps = []
    >>> callback = at(1, 12)(lambda checkpoint: steps.append(checkpoint.step))
    >>> for step in 1, 6, 11, 16:
    ...     checkpoint = Checkpoint(step=step, state=None, metrics={}, n_completed_steps=5)
    ...     checkpoint = callback(checkpoint)
    >>> steps
    [1, 16]
    """
    if not steps or not all(isinstance(step, int) and step >= 0 for step in steps):
        raise ValueError(f"at needs one or more steps, such as at(1, 1000), got {steps}.")

    def is_due(checkpoint: Checkpoint) -> bool:
        return any(_n_before(checkpoint) < step <= checkpoint.step for step in steps)

    return _scheduled(is_due, None, "at")


def when(predicate: Callable[[Checkpoint], Any]) -> Callable[[Callback], Callback]:
    """Makes a decorator: its callback runs only at the checkpoints that the predicate is true of.

    >>> steps = []
    >>> callback = when(lambda c: c.loss < 0.3)(lambda c: steps.append(c.step))
    >>> for step in 1, 2, 4:
    ...     checkpoint = callback(Checkpoint(step=step, state=None, metrics={"loss": 1 / step}))
    >>> steps
    [4]
    """
    if not callable(predicate):
        raise TypeError(f"when needs a function of a checkpoint, got {predicate!r}.")
    return _scheduled(predicate, None, "when")


def _n_before(checkpoint: Checkpoint) -> int:
    """The step of the checkpoint before this one."""
    return checkpoint.step - max(1, checkpoint.n_completed_steps)


class _Elapsed:
    """Whether some seconds have passed since it was last true; true at first."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._last: float | None = None

    def __call__(self, checkpoint: Checkpoint) -> bool:
        # The clocks of several processes are not one, and what is due may need all of them.
        return from_main("whether something is due", self._is_due)

    def _is_due(self) -> bool:
        now = self._clock()
        if self._last is not None and now - self._last < self._seconds:
            return False
        self._last = now
        return True


def _scheduled(is_due: Callable[[Checkpoint], Any], callback: Any, owner: str) -> Any:
    def schedule(callback: Callback) -> Scheduled:
        return Scheduled(is_due, callback, owner)

    return schedule if callback is None else schedule(callback)
