"""Schedules: `every`, `at` and `when` run a callback at some of the checkpoints."""

import functools
import time
from collections.abc import Callable
from typing import Any

from flaxfit.callbacks._callback import Callback
from flaxfit.distributed import from_main
from flaxfit.state import Checkpoint


class Scheduled:
    """Passes some checkpoints on to a callback; see `every`, `at` and `when`."""

    def __init__(
        self, owner: str, is_due: Callable[[Checkpoint], object], callback: Callback
    ) -> None:
        if not callable(callback):
            raise TypeError(f"{owner} needs a callable of a checkpoint, got {callback!r}.")
        self._is_due = is_due
        self._callback = callback
        # Like `functools.wraps`: `owner_of` unwraps it, and saves the state by the callback's name.
        self.__wrapped__ = callback

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the callback's result if it is due, else the checkpoint."""
        if not self._is_due(checkpoint):
            return checkpoint
        changed = self._callback(checkpoint)
        return checkpoint if changed is None else changed

    def __getattr__(self, name: str) -> Any:
        """Returns the other attributes of the callback (attach, close, get_state, ...).

        Private names are not passed on: a copy looks them up before `_callback` exists.
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

    If there is no checkpoint at a multiple of `n`, it runs at the next one after it. With
    `seconds`, it runs at the first checkpoint and then whenever this many seconds have passed since
    it last ran. Other checkpoints pass unchanged. The loop decides where checkpoints are:
    `first_checkpoint=n_steps_per_checkpoint` puts them at multiples. Without a callback it is a
    decorator: `every(10)(callback)`.

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
        decorate = functools.partial(Scheduled, "every", _have_passed(seconds, clock))
    elif isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"every needs a number of steps of at least 1, got {n!r}.")
    else:
        decorate = functools.partial(Scheduled, "every", lambda c: _n_before(c) // n < c.step // n)
    return decorate if callback is None else decorate(callback)


def at(*steps: int) -> Callable[[Callback], Callback]:
    """Makes a decorator: its callback runs only at the checkpoints of these steps.

    If there is no checkpoint at a step, it runs at the next one after it.

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
    return functools.partial(
        Scheduled, "at", lambda c: any(_n_before(c) < step <= c.step for step in steps)
    )


def when(predicate: Callable[[Checkpoint], object]) -> Callable[[Callback], Callback]:
    """Makes a decorator: its callback runs only at checkpoints for which the predicate is true.

    >>> steps = []
    >>> callback = when(lambda c: c.loss < 0.3)(lambda c: steps.append(c.step))
    >>> for step in 1, 2, 4:
    ...     checkpoint = callback(Checkpoint(step=step, state=None, metrics={"loss": 1 / step}))
    >>> steps
    [4]
    """
    if not callable(predicate):
        raise TypeError(f"when needs a function of a checkpoint, got {predicate!r}.")
    return functools.partial(Scheduled, "when", predicate)


def _n_before(checkpoint: Checkpoint) -> int:
    """Returns the step of the previous checkpoint."""
    return checkpoint.step - max(1, checkpoint.n_completed_steps)


def _have_passed(seconds: float, clock: Callable[[], float]) -> Callable[[Checkpoint], bool]:
    """Makes a predicate that is true at first, and then once every `seconds`."""
    last: float | None = None

    def is_due() -> bool:
        nonlocal last
        now = clock()
        if last is not None and now - last < seconds:
            return False
        last = now
        return True

    # Process 0 decides: clocks differ, and the callback may need all processes (collectives).
    return lambda checkpoint: from_main("whether something is due", is_due)
