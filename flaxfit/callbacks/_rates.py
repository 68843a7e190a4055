"""Callbacks that set the learning rate: by a function of the step, or on a plateau of a metric."""

import inspect
from collections.abc import Callable, Mapping

from flaxfit.callbacks._callback import Loop, attached
from flaxfit.display import say
from flaxfit.metrics._monitor import Monitor
from flaxfit.optim._hyperparams import in_group, learning_rates
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.tree._types import Json

_USE = "sets the rate of"


class LearningRateScheduler:
    """Sets the learning rate for the steps up to the next checkpoint.

    The optimizer must let it be set: `OptimizerDef(optax.adam, learning_rate=1e-3)`. For a rate
    that changes with every step, give the optimizer an optax schedule instead.

    >>> LearningRateScheduler(lambda step, rate: 0.5 * rate).group is None
    True

    Args:
      schedule: `(completed steps, present rate) -> rate`; called once before the first step,
        and once before the first step after each checkpoint, also of a run that is resumed
        there or trained further.
      group: the group of a `MultiOptimizer` to set it for; None: all of them.

    Raises:
      TypeError: the schedule does not take the two arguments.
    """

    borrows = True

    def __init__(
        self, schedule: Callable[[int, float], float], *, group: str | int | None = None
    ) -> None:
        _check_schedule(schedule)
        self.schedule = schedule
        self.group = group
        self._loop: Loop | None = None
        self._reset()

    def _reset(self) -> None:
        self._is_due = True
        """Whether to call the schedule before the next step."""
        self._n_set = 0
        self._undo: tuple[tuple[int, ...], dict[str | None, float]] | None = None
        """The revision of the loop after the rates were set, and the rates before."""

    def attach(self, loop: Loop) -> None:
        """Resets it for a loop, and checks that the rates can be set."""
        self._reset()
        self._loop = loop
        _rates(loop, self.group, "LearningRateScheduler")
        loop.starters.append(self._start)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the checkpoint unchanged; the rate is set before the next step."""
        attached(self._loop, "LearningRateScheduler", _USE)
        self._is_due = True
        return checkpoint

    def close(self) -> None:
        """Undoes a change of the rates after which no step was taken."""
        loop = self._loop
        if loop is not None and self._undo is not None and self._undo[0] == loop.revision:
            _set(loop, self._undo[1])
            self._is_due = True
        self._undo = None

    def get_state(self) -> dict[str, Json]:
        """Returns what a resumed run needs; the optimizer's state holds the rate itself."""
        return {"is_due": self._is_due}

    def set_state(self, state: Mapping[str, Json]) -> None:
        loop = attached(self._loop, "LearningRateScheduler", _USE)
        self._is_due, self._n_set = state["is_due"], loop.revision[1]

    def _start(self, step: int) -> None:
        loop = attached(self._loop, "LearningRateScheduler", _USE)
        # A state that was restored since has the rate that it was saved with.
        if not self._is_due and self._n_set == loop.revision[1]:
            return
        before = _rates(loop, self.group, "LearningRateScheduler")
        new = {group: float(self.schedule(step, rate)) for group, rate in before.items()}
        changed = {group: rate for group, rate in new.items() if before[group] != rate}
        _set(loop, changed)
        self._is_due, self._n_set = False, loop.revision[1]
        self._undo = loop.revision, {group: before[group] for group in changed}


def _check_schedule(schedule: Callable[[int, float], float]) -> None:
    try:
        signature = inspect.signature(schedule)
    except ValueError:  # Written in C, without a signature.
        return
    try:
        signature.bind(0, 0.0)
    except TypeError:
        raise TypeError(
            "LearningRateScheduler needs a function (completed steps, present rate) -> rate, such "
            f"as lambda step, rate: 0.5 * rate, got one of {signature}."
        ) from None


class ReduceLROnPlateau:
    """Lowers the learning rate when a metric no longer improves.

    >>> plateau = ReduceLROnPlateau("val_loss", factor=0.5, patience=3)
    >>> plateau.get_state()["n_waited"]
    0

    Args:
      monitor: the metric to watch.
      factor: the factor by which the rate is multiplied.
      patience: the number of checkpoints without improvement after which it is lowered.
      min_delta: an improvement is larger than this.
      cooldown: the number of checkpoints after a reduction that are not counted.
      min_lr: the rate is not lowered below this.
      mode: "min", "max", or "auto", for the metrics and losses of flaxfit and of Optax.
      group: the group of a `MultiOptimizer`; None: all of them.
    """

    borrows = True

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        factor: float = 0.1,
        patience: int = 10,
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
        mode: str = "auto",
        group: str | int | None = None,
    ) -> None:
        if not 0 < factor < 1:
            raise ValueError(f"factor must lie between 0 and 1, got {factor}.")
        if patience < 0 or cooldown < 0 or min_delta < 0 or min_lr < 0:
            raise ValueError(
                "patience, cooldown, min_delta and min_lr must not be negative, got "
                f"{patience}, {cooldown}, {min_delta} and {min_lr}."
            )
        self._monitor = Monitor(monitor, mode, "ReduceLROnPlateau")
        self._factor, self._patience, self._min_delta = factor, patience, min_delta
        self._cooldown, self._min_lr, self._group = cooldown, min_lr, group
        self._best: float | None = None
        self._n_waited = self._n_cooling = 0
        self._loop: Loop | None = None

    def attach(self, loop: Loop) -> None:
        """Resets it for a loop, which must report the metric."""
        self._best, self._n_waited, self._n_cooling = None, 0, 0
        self._loop = loop
        self._monitor.attach(loop, self)
        _rates(loop, self._group, "ReduceLROnPlateau")

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Lowers the rate of the loop when patience has run out."""
        value = self._monitor.read(checkpoint)
        if value is None:
            return checkpoint
        is_cooling, self._n_cooling = self._n_cooling > 0, max(0, self._n_cooling - 1)
        if self._monitor.is_better(value, self._best, self._min_delta):
            self._best, self._n_waited = value, 0
        elif not is_cooling:
            self._n_waited += 1
            if self._n_waited >= max(1, self._patience):
                self._n_waited, self._n_cooling = 0, self._cooldown
                self._lower(checkpoint)
        return checkpoint

    def _lower(self, checkpoint: Checkpoint) -> None:
        loop = attached(self._loop, "ReduceLROnPlateau", _USE)
        for group, rate in _rates(loop, self._group, "ReduceLROnPlateau").items():
            new = max(rate * self._factor, self._min_lr)
            if new < rate:
                _set(loop, {group: new})
                where = "" if group is None else f" of {group!r}"
                best = "never was finite" if self._best is None else f"stands at {self._best:.4g}"
                say(
                    f"step {checkpoint.step:,}: {self._monitor.name} {best}, "
                    f"learning rate{where} lowered to {new:.4g}"
                )

    def get_state(self) -> dict[str, Json]:
        """Returns what a resumed run needs; the optimizer's state holds the rate itself."""
        return {"best": self._best, "n_waited": self._n_waited, "n_cooling": self._n_cooling}

    def set_state(self, state: Mapping[str, Json]) -> None:
        self._best, self._n_waited = state["best"], state["n_waited"]
        self._n_cooling = state["n_cooling"]
        self._monitor.was_seen |= self._best is not None


def _rates(loop: Loop, group: str | int | None, owner: str) -> dict[str | None, float]:
    """The learning rates of a loop by group; under None that of an optimizer without groups."""
    known = loop.hyperparams
    found = learning_rates(known) if group is None else in_group(known, loop.group_name(group))
    if not found:
        where = "" if group is None else f" in group {group!r}"
        raise ValueError(
            f"{owner} cannot set the learning rate: the optimizer holds none{where} that can be "
            "set. Make it with flaxfit.optim.OptimizerDef(optax.adam, learning_rate=1e-3), or use "
            "an optax schedule."
        )
    return found


def _set(loop: Loop, rates: Mapping[str | None, float]) -> None:
    for group, rate in rates.items():
        loop.set_hyperparams(group=group, learning_rate=rate)
