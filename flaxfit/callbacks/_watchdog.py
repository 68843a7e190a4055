"""Watchdog: ends a run that hangs, and shows where it hung."""

import threading
import time
import weakref

from flaxfit.callbacks._exit import ExitCode, end_with_stacks
from flaxfit.loop import TrainLoop
from flaxfit.state import Checkpoint

_INTERVALS = 10


class Watchdog:
    """Ends the process when no step completes for a time, and shows where each thread is.

    Its thread checks the loop a few times per allowance, at no cost per step. Only the loop's own
    work counts (fetching batches, stepping, making a checkpoint), not your code between
    checkpoints, nor a stopped process. Compilation, the inspection of the first batch and the
    callbacks (evaluation, saving) have their own allowance. The exit code is `ExitCode.HUNG`.

    Given to a `TrainLoop` or to `fit`, it also guards the very first batch, including the first one
    of the validation data. Code that never releases Python's lock also stops the watchdog.

    >>> watchdog = Watchdog(300, slow_seconds=3600)

    Args:
      seconds: how long a step may take; several times the longest expected.
      slow_seconds: how long a compilation may take, and the callbacks of a checkpoint; None:
        without limit.
    """

    borrows = True
    order = "first"
    """It also watches the fetch of the first batch, and the other callbacks while they close."""

    def __init__(self, seconds: float, *, slow_seconds: float | None = None) -> None:
        if seconds <= 0 or (slow_seconds is not None and slow_seconds <= 0):
            raise ValueError(
                "Watchdog needs positive allowances, "
                f"got seconds={seconds}, slow_seconds={slow_seconds}."
            )
        self._limits = {"training": seconds, "preparing": slow_seconds, "callbacks": slow_seconds}
        self._loop: weakref.ref[TrainLoop] | None = None
        self._ended: threading.Event | None = None

    def attach(self, loop: TrainLoop) -> None:
        """Starts to watch a loop."""
        self.close()
        self._loop = weakref.ref(loop)
        self._watch(self._loop)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the checkpoint unchanged; watches again if the loop continues after `close`."""
        if self._ended is None and self._loop is not None:
            self._watch(self._loop)
        return checkpoint

    def _watch(self, loop: weakref.ref[TrainLoop]) -> None:
        self._ended = threading.Event()
        arguments = (loop, self._limits, self._ended)
        threading.Thread(
            target=_guard, args=arguments, daemon=True, name="flaxfit-watchdog"
        ).start()

    def close(self) -> None:
        """Stops watching."""
        if self._ended is not None:
            self._ended.set()
            self._ended = None


def _guard(
    loop_ref: weakref.ref[TrainLoop], limits: dict[str, float | None], ended: threading.Event
) -> None:
    interval = min(limit for limit in limits.values() if limit is not None) / _INTERVALS
    seen, waited, before = None, 0.0, time.monotonic()
    while not ended.wait(interval):
        loop = loop_ref()
        if loop is None:
            return
        here, now = (loop.phase, loop.step), time.monotonic()
        del loop  # Do not keep it alive while waiting.
        # Cap the step of time: a process suspended for an hour has not hung for an hour.
        waited = waited + min(now - before, 2 * interval) if here == seen else 0.0
        seen, before = here, now
        limit = limits.get(here[0])
        if limit is not None and waited >= limit:
            reason = f"step {here[1] + 1:,} has not ended for {waited:.1f} s (at: {here[0]})"
            end_with_stacks(ExitCode.HUNG, reason)
