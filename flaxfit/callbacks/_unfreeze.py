"""Unfreeze: starts to train frozen parameters at later checkpoints."""

import numbers
import re
from collections.abc import Iterable, Mapping, Sequence

from flaxfit.callbacks._callback import attached
from flaxfit.display import say
from flaxfit.loop import TrainLoop
from flaxfit.state import Checkpoint
from flaxfit.tree import Json, flat


class Unfreeze:
    """Unfreezes parameters after a number of checkpoints (epochs, in `fit`).

    The task's `freeze=` says what is frozen at first. Each stage recompiles the update and keeps
    the optimizer state of the other parameters; Adam's bias correction of the new ones begins
    there. A resumed run begins with what was trained when it was saved.

    >>> unfreeze = Unfreeze({2: "encoder/layer_1/.*", 4: "encoder/.*"})

    Args:
      schedule: patterns of parameter paths by the number of checkpoints after which to train
        them.
    """

    borrows = unfreezes = True

    def __init__(self, schedule: Mapping[int, str | Sequence[str]]) -> None:
        are_numbers = all(isinstance(n, numbers.Integral) for n in schedule)
        if not are_numbers or not all(schedule.values()) or min(schedule, default=0) < 1:
            raise ValueError(
                "Unfreeze needs patterns by a number of checkpoints of 1 or more, such as "
                f"{{2: 'encoder/.*'}}, got {dict(schedule)}."
            )
        self._schedule = {
            n: (patterns,) if isinstance(patterns, str) else tuple(patterns)
            for n, patterns in schedule.items()
        }
        self._loop: TrainLoop | None = None
        self._n_seen = 0

    def attach(self, loop: TrainLoop) -> None:
        """Starts to count; checks that every pattern matches, and that a parameter is frozen."""
        self._loop, self._n_seen = loop, 0
        paths = list(flat(loop.state.params))
        frozen = _frozen(loop)
        if not frozen and loop.start is None:
            raise ValueError("Unfreeze has nothing to do: the task freezes no parameter (freeze=).")
        for pattern in [p for patterns in self._schedule.values() for p in patterns]:
            if not any(re.fullmatch(pattern, path) for path in paths):
                raise ValueError(
                    f"Unfreeze({pattern!r}) matches no parameter; frozen are: {', '.join(frozen)}."
                )

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Unfreezes the parameters due at this checkpoint; returns it unchanged."""
        loop = attached(self._loop, "Unfreeze", "changes")
        self._n_seen += 1
        if self._n_seen in self._schedule:
            n = _unfreeze(loop, self._schedule[self._n_seen])
            say(f"step {checkpoint.step:,}: {n} more parameter arrays are trained from now on")
        return checkpoint

    def get_state(self) -> dict[str, Json]:
        return {"n_seen": self._n_seen}

    def set_state(self, state: Mapping[str, Json]) -> None:
        """Restores the count, and unfreezes the parameters due by then; call it after `attach`."""
        self._n_seen = state["n_seen"]
        due = [p for n, patterns in self._schedule.items() if n <= self._n_seen for p in patterns]
        if due and self._loop is not None:
            _unfreeze(self._loop, due)


def _unfreeze(loop: TrainLoop, patterns: Iterable[str]) -> int:
    """Unfreezes the parameters that match; returns the number of their arrays."""
    frozen = _frozen(loop)
    rest = [path for path in frozen if not any(re.fullmatch(p, path) for p in patterns)]
    if rest != frozen:
        loop.freeze = tuple(map(re.escape, rest))
    return len(frozen) - len(rest)


def _frozen(loop: TrainLoop) -> list[str]:
    patterns = loop.freeze
    return [p for p in flat(loop.state.params) if any(re.fullmatch(each, p) for each in patterns)]
