"""Callbacks that end training: when it no longer improves, or no longer is finite."""

import math
from collections.abc import Mapping

import numpy as np

from flaxfit.callbacks._callback import first_epoch, watch_metrics
from flaxfit.display import count, plural, say
from flaxfit.loop import TrainLoop
from flaxfit.metrics._monitor import Monitor
from flaxfit.optim._averaged import has_average, with_average_of
from flaxfit.state import Checkpoint
from flaxfit.tree import Json, PyTree, copied, whole_number

_WEIGHTS = ("params", "model_state", "opt_state")
"""The last field is kept only if it holds an average of the parameters."""
_FINITE = ("loss", "grad_norm")


class EarlyStopping:
    """Stops training when a metric no longer improves, and restores the best weights.

    The best parameters, their average (of `ema=` or a schedule-free optimizer) and model state, but
    no other optimizer state, are restored when training ends for any reason: stopped here, out of
    steps or data, interrupted, failed. For this it must be in the `callbacks` of the loop (`every`
    may wrap it). A `CheckpointFileWriter` saves them as well, so a resumed run restores the same
    weights.

    >>> stopping = EarlyStopping("val_loss", patience=2, restore_best=False)
    >>> for step, loss in enumerate([0.9, 0.5, 0.7, 0.6]):
    ...     checkpoint = Checkpoint(step=step, state=None, metrics={"val_loss": loss})
    ...     checkpoint = stopping(checkpoint)
    >>> checkpoint.stop, stopping.best_value, stopping.best_step
    (True, 0.5, 1)

    Args:
      monitor: the metric to watch.
      min_delta: the change that an improvement must exceed; a tie is never an improvement.
      patience: the number of checkpoints without improvement that end training; 0 means 1.
      verbose: 1 prints when it stops and what it restores.
      mode: "min", "max", or "auto", for the metrics and losses of flaxfit and of Optax.
      baseline: a value to beat; only improvements beyond it reset `patience`.
      restore_best_weights: Keras's name for `restore_best`.
      start_from_epoch: the number of initial checkpoints (epochs, in `fit`) to ignore: they neither
        end training nor are the best.
      restore_best: whether to restore the best weights when training ends; None: yes.
      check_finite: whether nan or inf stops training at once; otherwise it counts as no
        improvement.
    """

    borrows = True

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        verbose: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool | None = None,
        start_from_epoch: int = 0,
        *,
        restore_best: bool | None = None,
        check_finite: bool = True,
    ) -> None:
        if patience < 0 or min_delta < 0 or start_from_epoch < 0:
            raise ValueError(
                "patience, min_delta and start_from_epoch must not be negative, got "
                f"patience={patience}, min_delta={min_delta}, start_from_epoch={start_from_epoch}."
            )
        if restore_best is not None and restore_best_weights is not None:
            raise ValueError(
                "EarlyStopping got restore_best and restore_best_weights, two names for one "
                "option: pass one of them."
            )
        given = restore_best_weights if restore_best is None else restore_best
        if baseline is not None and (
            isinstance(baseline, bool) or not isinstance(baseline, int | float | np.number)
        ):
            raise ValueError(f"baseline must be a number or None, got {baseline!r}.")
        self._monitor = Monitor(monitor, mode, "EarlyStopping")
        self._patience = patience
        self._min_delta = min_delta
        self._baseline, self._start_from = baseline, start_from_epoch
        self.restore_best: bool = given is None or bool(given)
        self._check_finite = check_finite
        self._verbose = verbose
        self._loop: TrainLoop | None = None
        self._reset()

    def _reset(self) -> None:
        self.best_value: float | None = None
        """The best value so far."""
        self.best_step: int | None = None
        """The step that reached it."""
        self.has_stopped: bool = False
        """Whether it has stopped training."""
        self.endings: list[str] = []
        """Messages: why it stopped training, and what it restored."""
        self._n_waited = self._n_seen = self._best_seen = 0
        self._best_weights: dict[str, PyTree] = {}
        self._is_closed = True

    def attach(self, loop: TrainLoop) -> None:
        """Attaches to a loop, which must report the metric."""
        self._reset()
        self._loop = loop
        self._monitor.attach(loop, self)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the checkpoint, with `stop` set when patience has run out."""
        self._is_closed = False
        value = self._monitor.read(checkpoint)
        self._n_seen += 1
        if value is None or self._n_seen <= self._start_from - first_epoch(self._loop):
            return checkpoint
        self._n_waited += 1
        if self._monitor.is_better(value, self.best_value, self._min_delta):
            self.best_value, self.best_step = value, checkpoint.step
            self._best_seen = self._n_seen
            if self._monitor.is_better(value, self._baseline, self._min_delta):
                self._n_waited = 0
            if self.restore_best and checkpoint.state is not None:
                names = _WEIGHTS if has_average(checkpoint.state) else _WEIGHTS[:2]
                weights = {name: getattr(checkpoint.state, name) for name in names}
                # The next step donates borrowed arrays.
                self._best_weights = copied(weights) if checkpoint.is_borrowed else weights
            return checkpoint
        if self._check_finite and not math.isfinite(value):
            say(f"step {checkpoint.step:,}: {self._monitor.name} is {value}, training stops")
        elif self._n_waited < self._patience:
            return checkpoint
        elif not self._verbose:
            unit = "epoch" if self._counts_epochs else "checkpoint"
            waited = plural(self._n_waited, unit)
            self.endings = [f"{self._monitor.name} has not improved for {waited}"]
        self.has_stopped = math.isfinite(value)
        if self.restore_best and self._loop is None:
            say(
                "EarlyStopping stops, but no loop is attached to restore the best weights: pass it "
                "in callbacks=, or pass restore_best=False"
            )
        if self._verbose:
            best = "" if self.best_value is None else f", best {self.best_value:.4g}"
            say(f"step {checkpoint.step:,}: {self._monitor.name} is {value:.4g}{best}: stopping")
        return checkpoint.replace(stop=True)

    @property
    def best(self) -> float | None:
        """`best_value`, as Keras calls it."""
        return self.best_value

    @property
    def best_epoch(self) -> int | None:
        """The index of the best epoch, from 0 (in a `TrainLoop`, of the best checkpoint)."""
        return first_epoch(self._loop) + self._best_seen - 1 if self._best_seen else None

    @property
    def stopped_epoch(self) -> int:
        """The index of the epoch after which it stopped training, from 0; 0 if it has not."""
        return first_epoch(self._loop) + self._n_seen - 1 if self.has_stopped else 0

    @property
    def _counts_epochs(self) -> bool:
        return self._loop is not None and self._loop.fit_call is not None

    def close(self) -> None:
        """Restores the best weights, once each time training ends."""
        loop, is_closed, self._is_closed = self._loop, self._is_closed, True
        if is_closed or loop is None or not self.restore_best:
            return
        if self.best_step in (None, loop.step):
            return
        is_averaged = has_average(loop.state)
        if not self._best_weights or (is_averaged and "opt_state" not in self._best_weights):
            say(
                f"the best weights (step {self.best_step:,}) were reached before this run was "
                "resumed, and were not saved with it: the last weights stay"
            )
            return
        kept = self._best_weights
        state = loop.state.replace(**{name: kept[name] for name in _WEIGHTS[:2] if name in kept})
        if is_averaged:
            state = with_average_of(state, kept)
        if state is None:
            say(
                f"the weights of step {self.best_step:,} cannot be restored, as their average "
                "covers other parameters than those trained now: the last weights stay"
            )
            return
        loop.restore(state)
        if self._verbose:
            say(f"the weights of step {self.best_step:,} are restored")
        else:
            best = f"step {self.best_step:,}"
            if self._best_seen and self._counts_epochs:
                best = f"epoch {count(first_epoch(loop) + self._best_seen)}"
            self.endings.append(f"restored the weights of {best}")

    def get_state(self) -> dict[str, PyTree]:
        """Returns what a resumed run needs: JSON, and the best weights as fields of a state."""
        return {
            **self._best_weights,
            "best_value": self.best_value,
            "best_step": self.best_step,
            "n_waited": self._n_waited,
            "n_seen": self._n_seen,
            "best_seen": self._best_seen,
            "endings": list(self.endings),
        }

    def set_state(self, state: Mapping[str, Json]) -> None:
        self._reset()
        self.best_value = state["best_value"]
        self.best_step = state["best_step"]
        self._n_waited, self._n_seen = state["n_waited"], state.get("n_seen", self._start_from)
        self._best_seen = state.get("best_seen", 0)
        self.endings = list(state.get("endings", ()))
        self._monitor.was_seen |= self.best_step is not None
        self._is_closed = False
        if self.restore_best:
            self._best_weights = {name: state[name] for name in _WEIGHTS if name in state}


class StopOnNaN:
    """Raises a FloatingPointError when the loss, or a reported `grad_norm`, is not finite.

    >>> check = StopOnNaN()
    >>> checkpoint = check(Checkpoint(step=9, state=None, metrics={"loss": 0.5}))
    >>> check(Checkpoint(step=18, state=None, metrics={"loss": float("nan")}))
    Traceback (most recent call last):
    FloatingPointError: loss became nan at step 18 (last finite 0.5 at step 9). Lower the ...

    Args:
      raise_error: whether to raise; otherwise training ends at that checkpoint, with a message.
      every: also checks within an epoch, every so many steps, which waits for the device; training
        ends at that step. With several processes the epoch ends first.
    """

    borrows = True

    def __init__(self, *, raise_error: bool = True, every: int | None = None) -> None:
        self._raises = raise_error
        self._every = None if every is None else whole_number("every", every)
        self._last: dict[str, str] = {}
        """The last finite values and their step, in words."""

    def attach(self, loop: TrainLoop) -> None:
        """Watches the steps of a loop if `every` is given."""

        def look(step: int, metrics: Mapping[str, float]) -> None:
            if not all(math.isfinite(metrics.get(name, 0.0)) for name in _FINITE):
                loop.finish()

        if self._every is not None:
            watch_metrics(loop, self._every, look)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the checkpoint if its loss and gradient norm are finite."""
        for name in _FINITE:
            if name not in checkpoint.metrics:
                continue
            value = float(checkpoint.metrics[name])
            if not math.isfinite(value):
                last = self._last.get(name, "no earlier checkpoint was seen")
                if not self._raises:
                    say(f"{name} became {value} at step {checkpoint.step:,} ({last}): stopping")
                    return checkpoint.replace(stop=True)
                raise FloatingPointError(
                    f"{name} became {value} at step {checkpoint.step:,} ({last}). "
                    "Lower the learning rate or clip: "
                    "optax.chain(optax.clip_by_global_norm(1.0), optimizer)."
                )
            self._last[name] = f"last finite {value:.4g} at step {checkpoint.step:,}"
        return checkpoint
