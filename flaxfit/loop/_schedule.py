"""Schedule: which steps of a run yield a checkpoint."""

import dataclasses

from flaxfit.tree import whole_number


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Checkpoints at the steps `first`, `first + every`, `first + 2 * every`, ..., and at `last`.

    >>> schedule = Schedule(first=1, every=5, last=10)
    >>> [schedule.after(step) for step in (0, 1, 5, 6, 9)]
    [1, 6, 6, 10, 10]

    Raises:
      TypeError: one of the numbers is not an integer.
      ValueError: one of them is too small.
    """

    first: int = 1
    every: int = 1
    last: int | None = None
    """The last step of the run; None: the run ends with its data."""

    def __post_init__(self) -> None:
        whole_number("first_checkpoint", self.first)
        whole_number("n_steps_per_checkpoint", self.every)
        if self.last is not None:
            whole_number("n_steps", self.last, least=0)

    def after(self, step: int, last: int | None = None) -> int:
        """Returns the first step after `step` that yields a checkpoint.

        Args:
          step: a completed step; from the last step on, no last step bounds the result.
          last: replaces `self.last`.
        """
        n = max(0, (step - self.first) // self.every + 1)
        target = self.first + n * self.every
        last = self.last if last is None else last
        return target if last is None or step >= last else min(target, last)
