"""LearningRateScheduler: sets the learning rate by a function of epochs or steps."""

import contextlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from flaxfit.callbacks._callback import attached, first_epoch
from flaxfit.callbacks._rates import rates_of, set_rates, take_rates
from flaxfit.display import say
from flaxfit.loop import TrainLoop
from flaxfit.state import Checkpoint
from flaxfit.tree import Json

_USE = "sets the rate of"
_UNITS = {"epoch": r"ep(och)?s?(_.*)?", "step": r"(.*_)?(steps?|updates?|iterations?|count)"}


class LearningRateScheduler:
    """Sets the learning rate for the steps up to the next checkpoint: for an epoch, in `fit`.

    What it counts follows from the name of its first argument. A function `(epoch)` or
    `(epoch, lr)` receives the number of the epoch, from 0, as in Keras (in a loop, the number of
    checkpoints before). A function `(step)` or `(step, rate)`, also an Optax schedule `(count)`,
    receives the number of completed steps. The second argument is the current rate.

    The rate must be a number, `optax.adam(1e-3)`, or a hyperparameter, `OptimizerDef(optax.adam,
    learning_rate=1e-3)`. Schedules raise an error. A function of the step alone is cheapest as the
    optimizer's own schedule, `optax.adam(schedule)`.

    >>> LearningRateScheduler(lambda epoch, lr: 0.1 if epoch < 10 else 0.9 * lr).unit
    'epoch'
    >>> LearningRateScheduler(lambda step: 0.1 / (1 + step)).unit
    'step'

    Args:
      schedule: the function; called once before the first step, and once before the first step
        after each checkpoint, also in a resumed or continued run.
      verbose: 1 prints each rate that is set.
      unit: "epoch" or "step", the unit that it counts; needed if the argument's name is neither.
      per_step: whether to call a function of the step before every step, one step per dispatch.
      group: the group of a `MultiOptimizer` to set it for; None: all of them.

    Raises:
      TypeError: the schedule takes other arguments, or it is not known what it counts.
    """

    borrows = True

    def __init__(
        self,
        schedule: Callable[..., float],
        verbose: int = 0,
        *,
        unit: str | None = None,
        per_step: bool = False,
        group: str | int | None = None,
    ) -> None:
        counted, self._takes_rate = _read(schedule, unit)
        self.unit: str = counted
        """The unit that the function counts: "epoch" or "step"."""
        if per_step and self.unit == "epoch":
            raise ValueError(
                "LearningRateScheduler(per_step=True) needs a function of the step, such as "
                "lambda step, rate: 0.999 * rate, got one of the epoch."
            )
        self.schedule: Callable[..., float] = schedule
        self._verbose, self._per_step = verbose, per_step
        self.group = group
        self._loop: TrainLoop | None = None
        self._reset()

    def _reset(self) -> None:
        self._is_due = True
        """Whether to call the schedule before the next step."""
        self._n_set = self._n_seen = 0
        self._undo: tuple[tuple[int, ...], dict[str | None, float]] | None = None
        """The loop's revision after the rates were set, and the previous rates."""

    def attach(self, loop: TrainLoop) -> None:
        """Resets it for a loop, and checks that the rates can be set."""
        self._reset()
        self._loop = loop
        take_rates(loop, self.group, "LearningRateScheduler")
        if self._per_step and loop.steps_per_call > 1:
            raise ValueError(
                "LearningRateScheduler(per_step=True) sets the rate of every step, but "
                f"{loop.steps_per_call} run per dispatch: remove steps_per_execution (in a loop, "
                "steps_per_call), or give the optimizer an Optax schedule."
            )
        (loop.on.before_step if self._per_step else loop.on.before_span).append(self._start)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the checkpoint unchanged; the rate is set before the next step."""
        attached(self._loop, "LearningRateScheduler", _USE)
        self._is_due, self._n_seen = True, self._n_seen + 1
        return checkpoint

    def close(self) -> None:
        """Undoes a change of the rates that no step has used."""
        loop = self._loop
        if loop is not None and self._undo is not None and self._undo[0] == loop.revision:
            set_rates(loop, self._undo[1])
            self._is_due = True
        self._undo = None

    def get_state(self) -> dict[str, Json]:
        """Returns what a resumed run needs; the optimizer's state holds the rate itself."""
        return {"is_due": self._is_due, "n_seen": self._n_seen}

    def set_state(self, state: Mapping[str, Json]) -> None:
        loop = attached(self._loop, "LearningRateScheduler", _USE)
        self._is_due, self._n_set = state["is_due"], loop.revision[1]
        self._n_seen = state.get("n_seen", 0)

    def _start(self, step: int) -> None:
        loop = attached(self._loop, "LearningRateScheduler", _USE)
        # A restored state brings the rate that it was saved with: set it again.
        if not (self._is_due or self._per_step) and self._n_set == loop.revision[1]:
            return
        n = step if self.unit == "step" else first_epoch(loop) + self._n_seen
        before = rates_of(loop, self.group, "LearningRateScheduler")
        new = {group: self._rate(n, rate) for group, rate in before.items()}
        changed = {group: rate for group, rate in new.items() if before[group] != rate}
        set_rates(loop, changed)
        self._is_due, self._n_set = False, loop.revision[1]
        self._undo = loop.revision, {group: before[group] for group in changed}
        if self._verbose:
            for group, rate in new.items():
                where = "" if group is None else f" of {group!r}"
                say(f"{self.unit} {n:,}: the learning rate{where} is {rate:.4g}")

    def _rate(self, n: int, rate: float) -> float:
        new = self.schedule(n, rate) if self._takes_rate else self.schedule(n)
        try:
            return float(new)
        except (TypeError, ValueError):
            raise TypeError(
                f"The schedule of LearningRateScheduler returned {new!r:.60} for {self.unit} {n}; "
                "expected a number."
            ) from None


def _read(schedule: Callable[..., float], unit: str | None) -> tuple[str, bool]:
    """Returns the unit that a schedule counts, and whether it takes the current rate."""
    if unit not in (None, *_UNITS):
        raise ValueError(f"unit must be 'epoch', 'step' or None, got {unit!r}.")
    names, takes_rate = _arguments(schedule)
    found = [each for each, pattern in _UNITS.items() if re.fullmatch(pattern, names[0].lower())]
    if unit is None and not found:
        raise TypeError(
            f"LearningRateScheduler cannot tell whether {names[0]!r} of its schedule counts epochs "
            "or steps: name it epoch or step, or pass unit='epoch' or unit='step'."
        )
    return unit or found[0], takes_rate


def _arguments(schedule: Any) -> tuple[list[str], bool]:
    """Returns the argument names of a schedule, and whether it takes two."""
    got = f"{schedule!r:.60}"
    if callable(schedule):
        try:
            signature = inspect.signature(schedule)
        except (TypeError, ValueError):  # A C function without a signature.
            return ["*"], True
        for n in (2, 1):
            with contextlib.suppress(TypeError):
                return [*signature.bind(*range(n)).arguments], n == 2
        got = f"one of {signature}"
    raise TypeError(
        "LearningRateScheduler needs a function (epoch), (epoch, lr), (step) or (step, rate) that "
        f"returns a rate, such as lambda epoch, lr: 0.9 * lr, got {got}."
    )
