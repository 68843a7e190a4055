"""How many steps to take in one dispatch: a number that the user gave, or "auto"."""

import functools
from typing import Any

from flaxfit.tree import whole_number

_MOST_STEPS = 32
# As many operations as a slow device of the kind does in a tenth of a second.
_MOST_WORK_ON_CPU, _MOST_WORK = 2e9, 2e11
_PAYS_FROM = 50_000
"""Steps in a run from which on the time of a second compilation is won back."""


class StepsPerCall:
    """Chooses the number of steps of each dispatch.

    Args:
      value: the largest number, or "auto".
    """

    def __init__(self, value: int | str = 1):
        self._is_auto = value == "auto"
        self.number = 1 if self._is_auto else whole_number("steps_per_call", value, other="auto")
        """The number that was given, or that "auto" has chosen."""

    def next(self, stepper: Any, n_left: int, spacing: int, n_total: int | None) -> int:
        """The number of steps of the next dispatch.

        "auto" takes several steps of arrays only, whose batches are indices: batches that a user's
        code makes may take much memory, or be made in one buffer.

        Args:
          stepper: the `Stepper` that takes them.
          n_left: the steps up to the next checkpoint.
          spacing: the steps between checkpoints.
          n_total: the steps of the run, those before it was resumed included; None: not known.
        """
        if self._is_auto:
            can_take_several = stepper.cursor.takes_rows and not next_is_slow(stepper)
            devices = stepper.strategy.devices
            work = stepper.inspection.work / len(devices)
            args = work, spacing, n_total or 0, devices[0].platform
            self.number = automatic_number(*args) if can_take_several else 1
            return self.number if self.number <= n_left else 1
        n = self.number if self.number <= n_left else n_left  # Faster than `min`, at each step.
        if n > 1 and next_is_slow(stepper):
            stepper.inspection.say_slow()
            return 1
        return n


def next_is_slow(stepper: Any) -> bool:
    """Whether steps like the next one run slowly in a loop; depends on the next batch alone.

    A resumed run therefore takes the same steps together.
    """
    cursor, feed, inspection = stepper.cursor, stepper.feed, stepper.inspection
    is_mixed = stepper.task.step is not None and not cursor.gathers
    if is_mixed or not feed.is_decided:
        items = cursor.peek()
        if cursor is not stepper.cursor:  # Reading it has set other data.
            return next_is_slow(stepper)
        if items:
            if not feed.is_decided:
                stepper.expect(items[0])
            if is_mixed:
                portion = feed.portion(items[0])
                inspection.inspect_loops(stepper.task, stepper.state, portion)
    return inspection.is_slow_in_loops


@functools.lru_cache
def automatic_number(work: float, spacing: int, n_total: int, platform: str) -> int:
    """The number of steps that "auto" takes in one dispatch.

    A dispatch costs some tens of microseconds, however little there is to compute. It lasts a tenth
    of a second at most, so that a signal or a watcher need not wait. The number divides the spacing
    of checkpoints, as the steps of a remainder need a program of their own; only in long runs it
    need not. It depends on no clock, so that a run takes the same programs each time.

    >>> automatic_number(1e6, 45, 1000, "cpu"), automatic_number(1e6, 47, 1000, "cpu")
    (15, 1)
    >>> automatic_number(1e6, 47, 100_000, "cpu"), automatic_number(1e9, 45, 1000, "cpu")
    (32, 1)

    Args:
      work: the operations of a step on each device.
      spacing: the steps between checkpoints.
      n_total: the steps of the run; 0: not known, so that few are counted on.
      platform: the platform of the devices, as JAX names it.
    """
    most_work = _MOST_WORK_ON_CPU if platform == "cpu" else _MOST_WORK
    most = max(1, int(min(_MOST_STEPS, spacing, most_work / max(work, 1))))
    divisor = next(n for n in range(most, 0, -1) if spacing % n == 0)
    return most if n_total >= _PAYS_FROM and 2 * divisor <= most else divisor
