"""ReduceLROnPlateau: lowers the learning rate when a metric no longer improves."""

from collections.abc import Mapping

import numpy as np

from flaxfit.callbacks._callback import attached
from flaxfit.callbacks._rates import rates_of, set_rates, take_rates
from flaxfit.display import say
from flaxfit.loop import TrainLoop
from flaxfit.metrics._monitor import Monitor
from flaxfit.state import Checkpoint
from flaxfit.tree import Json


class ReduceLROnPlateau:
    """Lowers the learning rate when a metric no longer improves, as in Keras.

    The rate must be a number, `optax.adam(1e-3)`, or a hyperparameter, `OptimizerDef(optax.adam,
    learning_rate=1e-3)`. Schedules raise an error.

    >>> plateau = ReduceLROnPlateau("val_loss", factor=0.5, patience=3)
    >>> plateau.get_state()["n_waited"]
    0

    Args:
      monitor: the metric to watch.
      factor: the factor by which the rate is multiplied.
      patience: the number of checkpoints without improvement after which it is lowered.
      verbose: 0 prints nothing.
      mode: "min", "max", or "auto", for the metrics and losses of flaxfit and of Optax.
      min_delta: the change that an improvement must exceed.
      cooldown: the number of checkpoints, including the one of the reduction, before it counts
        again.
      min_lr: the rate is not lowered below this.
      group: the group of a `MultiOptimizer`; None: all of them.
    """

    borrows = True

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 1,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
        *,
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
        self._verbose = verbose
        self._best: float | None = None
        self._n_waited = self._n_cooling = 0
        self._loop: TrainLoop | None = None

    def attach(self, loop: TrainLoop) -> None:
        """Resets it for a loop, which must report the metric."""
        self._best, self._n_waited, self._n_cooling = None, 0, 0
        self._loop = loop
        self._monitor.attach(loop, self)
        take_rates(loop, self._group, "ReduceLROnPlateau")

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Lowers the rate of the loop when patience has run out."""
        value = self._monitor.read(checkpoint)
        if value is None:
            return checkpoint
        if self._n_cooling:
            self._n_cooling, self._n_waited = self._n_cooling - 1, 0
        if self._monitor.is_better(value, self._best, self._min_delta):
            self._best, self._n_waited = value, 0
        elif not self._n_cooling:
            self._n_waited += 1
            if self._n_waited >= self._patience and self._lower(checkpoint):
                self._n_waited, self._n_cooling = 0, self._cooldown
        return checkpoint

    def _lower(self, checkpoint: Checkpoint) -> bool:
        """Lowers the rates above the minimum; returns whether any was."""
        loop = attached(self._loop, "ReduceLROnPlateau", "sets the rate of")
        before = rates_of(loop, self._group, "ReduceLROnPlateau")
        lowest = float(np.float32(self._min_lr))  # The rates are float32.
        new = {g: max(r * self._factor, self._min_lr) for g, r in before.items() if r > lowest}
        set_rates(loop, new)
        if self._verbose:
            self._report(checkpoint, new)
        return bool(new)

    def _report(self, checkpoint: Checkpoint, rates: Mapping[str | None, float]) -> None:
        best = "never was finite" if self._best is None else f"stands at {self._best:.4g}"
        for group, rate in rates.items():
            where = "" if group is None else f" of {group!r}"
            say(
                f"step {checkpoint.step:,}: {self._monitor.name} {best}, "
                f"learning rate{where} lowered to {rate:.4g}"
            )

    def get_state(self) -> dict[str, Json]:
        """Returns what a resumed run needs; the optimizer's state holds the rate itself."""
        return {"best": self._best, "n_waited": self._n_waited, "n_cooling": self._n_cooling}

    def set_state(self, state: Mapping[str, Json]) -> None:
        self._best, self._n_waited = state["best"], state["n_waited"]
        self._n_cooling = state["n_cooling"]
        self._monitor.was_seen |= self._best is not None
