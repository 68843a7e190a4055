"""StepsPerCall: the number of steps in one dispatch, given by the user or "auto"."""

import functools
from typing import Any

from flaxfit.tree import whole_number

_MOST_STEPS = 32
# The operations of a slow CPU or accelerator in a tenth of a second.
_MOST_WORK_ON_CPU, _MOST_WORK = 2e9, 2e11
_PAYS_FROM = 50_000
"""The number of steps from which a second compilation pays off."""


class StepsPerCall:
    """Chooses the number of steps of each dispatch.

    Args:
      value: the largest number of steps, or "auto".
    """

    def __init__(self, value: int | str = 1):
        self._is_auto = value == "auto"
        self.number = 1 if self._is_auto else whole_number("steps_per_call", value, other="auto")
        """The given number, or the latest choice of "auto"."""

    def next(self, stepper: Any, n_left: int) -> int:
        """Returns the number of steps in the next dispatch.

        "auto" groups steps only for arrays, whose batches are indices: batches made by user code
        may take much memory, or share one buffer.

        Args:
          stepper: the `Stepper` that takes them.
          n_left: the number of steps up to the next checkpoint.
        """
        if self._is_auto:
            can_take_several = stepper.cursor.takes_rows and not next_is_slow(stepper)
            devices = stepper.strategy.devices
            work = stepper.inspection.work / len(devices)
            args = work, stepper.spacing, stepper.n_total, devices[0].platform
            self.number = automatic_number(*args) if can_take_several else 1
            return self.number if self.number <= n_left else 1
        n = self.number if self.number <= n_left else n_left  # Faster than `min`, at each step.
        if n > 1 and next_is_slow(stepper):
            stepper.inspection.say_slow()
            return 1
        return n


def next_is_slow(stepper: Any) -> bool:
    """Returns whether steps like the next one run slowly in a loop.

    It depends on the next batch alone, so that a resumed run groups steps as before.
    """
    cursor, feed, inspection = stepper.cursor, stepper.feed, stepper.inspection
    is_mixed = stepper.task.step is not None and not cursor.gathers
    if is_mixed or not feed.is_decided:
        items = cursor.peek()
        if cursor is not stepper.cursor:  # Fetching a batch replaced `loop.data`.
            return next_is_slow(stepper)
        if items:
            if not feed.is_decided:
                stepper.expect(items[0])
            if is_mixed:
                prepared = feed.prepare(items[0])
                inspection.inspect_loops(stepper.task, stepper.state, prepared)
    return inspection.is_slow_in_loops


@functools.lru_cache
def automatic_number(work: float, spacing: int, n_total: int, platform: str) -> int:
    """Returns the number of steps that "auto" takes in one dispatch.

    Grouping saves the fixed cost of a dispatch, some tens of microseconds. A group takes about a
    tenth of a second at most, so that signals are handled soon. The number divides the spacing of
    checkpoints, since a remainder needs another program; only long runs pay for that. It depends
    on no clock, so that equal runs use equal programs.

    >>> automatic_number(1e6, 45, 1000, "cpu"), automatic_number(1e6, 47, 1000, "cpu")
    (15, 1)
    >>> automatic_number(1e6, 47, 100_000, "cpu"), automatic_number(1e9, 45, 1000, "cpu")
    (32, 1)

    Args:
      work: the operations of a step per device.
      spacing: the number of steps between checkpoints.
      n_total: the number of steps of the run; 0: unknown, treated as few.
      platform: the platform of the devices, as JAX names it.
    """
    most_work = _MOST_WORK_ON_CPU if platform == "cpu" else _MOST_WORK
    most = max(1, int(min(_MOST_STEPS, spacing, most_work / max(work, 1))))
    divisor = next(n for n in range(most, 0, -1) if spacing % n == 0)
    return most if n_total >= _PAYS_FROM and 2 * divisor <= most else divisor
