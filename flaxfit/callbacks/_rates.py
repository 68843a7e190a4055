"""Callbacks that set the learning rate: by a function of the step, when a metric stands still."""

from collections.abc import Callable, Mapping
from typing import Any

from flaxfit._checkpoint import Checkpoint
from flaxfit._display import say
from flaxfit._monitor import is_better, read_metric, resolve_mode
from flaxfit.callbacks._callback import Loop
from flaxfit.optim._learning_rates import in_group, learning_rates


class LearningRateScheduler:
    """Sets the learning rate for the steps up to the next checkpoint.

    The optimizer must let it be set: `OptimizerDef(optax.adam, learning_rate=1e-3)`. For a rate
    that changes with every step, give the optimizer an optax schedule instead.

    >>> LearningRateScheduler(lambda step, rate: 0.5 * rate).group is None
    True
    """

    def __init__(
        self, schedule: Callable[[int, float], float], *, group: str | int | None = None
    ) -> None:
        """Describes the rate.

        Args:
          schedule: `(completed steps, present rate) -> rate`; first called before the first step.
          group: the group of a `MultiOptimizer` to set it for; None: all of them.
        """
        self.schedule = schedule
        self.group = group
        self._loop: Any = None

    def attach(self, loop: Loop) -> None:
        """Sets the rate to begin with."""
        self._loop = loop
        self._set(loop.step)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint; the loop goes on with the rate of its step."""
        self._set(checkpoint.step)
        return checkpoint

    def _set(self, step: int) -> None:
        for group, rate in rates(self._loop, self.group, "LearningRateScheduler").items():
            new = float(self.schedule(step, rate))
            if new != rate:
                self._loop.set_hyperparams(group=group, learning_rate=new)


class ReduceLROnPlateau:
    """Lowers the learning rate when a metric no longer improves.

    >>> plateau = ReduceLROnPlateau("val_loss", factor=0.5, patience=3)
    >>> plateau.get_state()["n_waited"]
    0
    """

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
        """Describes when to lower the rate, and by how much.

        Args:
          monitor: the metric to watch.
          factor: what the rate is multiplied by.
          patience: how many checkpoints without improvement lower it.
          min_delta: an improvement is larger than this.
          cooldown: how many checkpoints after a reduction are not counted.
          min_lr: the rate is not lowered below this.
          mode: "min", "max", or "auto": losses and errors are minimised, the rest maximised.
          group: the group of a `MultiOptimizer`; None: all of them.
        """
        if not 0 < factor < 1:
            raise ValueError(f"factor must lie between 0 and 1, got {factor}.")
        if patience < 0 or cooldown < 0 or min_delta < 0 or min_lr < 0:
            raise ValueError(
                "patience, cooldown, min_delta and min_lr must not be negative, got "
                f"{patience}, {cooldown}, {min_delta} and {min_lr}."
            )
        self._monitor, self._mode = monitor, resolve_mode(monitor, mode)
        self._factor, self._patience, self._min_delta = factor, patience, min_delta
        self._cooldown, self._min_lr, self._group = cooldown, min_lr, group
        self._best: float | None = None
        self._n_waited = self._n_cooling = 0
        self._loop: Any = None

    def attach(self, loop: Loop) -> None:
        """Starts afresh for a loop."""
        self._best, self._n_waited, self._n_cooling = None, 0, 0
        self._loop = loop
        rates(loop, self._group, "ReduceLROnPlateau")

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint; the loop goes on with a lower rate when patience has run out."""
        if self._monitor not in checkpoint.metrics and self._best is not None:
            return checkpoint  # Measured at other checkpoints only.
        value = read_metric(checkpoint.metrics, self._monitor, "ReduceLROnPlateau")
        is_cooling, self._n_cooling = self._n_cooling > 0, max(0, self._n_cooling - 1)
        if is_better(value, self._best, self._mode, self._min_delta):
            self._best, self._n_waited = value, 0
        elif not is_cooling:
            self._n_waited += 1
            if self._n_waited >= max(1, self._patience):
                self._n_waited, self._n_cooling = 0, self._cooldown
                self._lower(checkpoint)
        return checkpoint

    def _lower(self, checkpoint: Checkpoint) -> None:
        for group, rate in rates(self._loop, self._group, "ReduceLROnPlateau").items():
            new = max(rate * self._factor, self._min_lr)
            if new < rate:
                self._loop.set_hyperparams(group=group, learning_rate=new)
                where = "" if group is None else f" of {group!r}"
                say(
                    f"step {checkpoint.step:,}: {self._monitor} stands still at {self._best:.4g}, "
                    f"learning rate{where} lowered to {new:.4g}"
                )

    def get_state(self) -> dict[str, Any]:
        """What a resumed run needs, as plain JSON; the rate itself is in the optimizer's state."""
        return {"best": self._best, "n_waited": self._n_waited, "n_cooling": self._n_cooling}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Puts back what `get_state` gave; call it after `attach`."""
        self._best, self._n_waited = state["best"], state["n_waited"]
        self._n_cooling = state["n_cooling"]


def rates(loop: Any, group: str | int | None, owner: str) -> dict[str | None, float]:
    """The learning rates of a loop by group; under None that of an optimizer without groups.

    Raises:
      ValueError: there is no loop, or its optimizer has none that can be set.
    """
    if loop is None:
        raise ValueError(f"{owner} must be in the callbacks of a loop, which it sets the rate of.")
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
