"""ProgressBar: a live bar on a terminal or in a notebook, and a line for each checkpoint."""

import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from flaxfit import display
from flaxfit.callbacks._bar import Bar, draw, new_bar
from flaxfit.callbacks._history import History
from flaxfit.callbacks._stopping import EarlyStopping
from flaxfit.loop import TrainLoop
from flaxfit.metrics._monitor import Monitor, check_mode, default_monitor
from flaxfit.state import Checkpoint
from flaxfit.tree import Json, owner_of

SECONDS_BETWEEN_REFRESHES = 0.5
# Steps are int32: a span of this many ends with the data.
ENDLESS = 2**31 - 1


class ProgressBar:
    """Shows the progress of training: a table of the checkpoints, and a live bar below it.

    The bar shows the running metrics, the speed and the time left, without compilation. It is
    drawn, and the metrics are read from the device, at most every 0.5 seconds. Where nothing can
    be redrawn (a log file, a pipe) only the table is written.

    A terminal shows the columns that fit, and "…" where others are left out; the best value is
    green there, unless `NO_COLOR` is set.

    >>> import sys
    >>> bar = ProgressBar(unit="epoch", total=10, file=sys.stdout)
    >>> metrics = {"loss": 1.7632, "val_accuracy": 0.8611}
    >>> checkpoint = bar(Checkpoint(step=44, state=None, metrics=metrics, elapsed_time=0.1))
    epoch     time     loss  val_accuracy
     1/10   100 ms   1.7632        0.8611 *

    Args:
      unit: "step" shows the step of the loop; any other word ("epoch") counts checkpoints,
        and the bar starts again after each.
      total: the number of units; None: the loop's `n_steps` for steps.
      start: the number of units done before (a resumed run).
      monitor: the metric whose best values are marked "*"; None: the metric of the loop's
        `EarlyStopping`, else the first validation metric, if there is one.
      mode: "min", "max", or "auto", for the metrics and losses of flaxfit and of Optax.
      live: whether to draw a bar; None: on a terminal or in a notebook.
      file: a text stream; None: standard error, in a notebook the cell's output.
      clock: gives the time in seconds.
    """

    borrows = True

    def __init__(
        self,
        *,
        unit: str = "step",
        total: int | None = None,
        start: int = 0,
        monitor: str | None = None,
        mode: str = "auto",
        live: bool | None = None,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_mode(mode)
        self._unit, self._total, self._start = unit, total, start
        self._mode = mode
        self._given = None if monitor is None else Monitor(monitor, mode, "ProgressBar")
        self._live, self._file, self._clock = live, file, clock
        self._chosen = self._given
        self._loop: TrainLoop | None = None
        self._bar: Bar | None = None
        self._reset(0)

    def _reset(self, step: int) -> None:
        self._n = step if self._unit == "step" else self._start
        self._bar_start = step
        self._monitor = self._chosen
        self._best: tuple[float, int] | None = None
        """The best value so far, and its epoch, step or checkpoint."""
        self._last: Checkpoint | None = None
        self._table = display.Table(self._unit)
        self._not_finite_since: int | None = None
        self._began: float | None = None
        self._previous: tuple[int, float] | None = None
        """The step and the time of the last dispatch since a checkpoint."""
        self._n_timed, self._seconds = 0, 0.0
        self._next_refresh = self._clock() + SECONDS_BETWEEN_REFRESHES

    def attach(self, loop: TrainLoop) -> None:
        """Resets the display for a loop."""
        self._loop = loop
        self._reset(loop.step)
        owners = [*map(owner_of, loop.callbacks)]
        added = [getattr(each, "adds", {}) for each in owners]
        self._table = display.Table(self._unit, dict.fromkeys(itertools.chain(*added)))
        if self._given is not None:
            self._given.attach(loop, self)
        # Mark the best values of the metric that EarlyStopping restores weights by.
        of_stopping = (each._monitor for each in owners if isinstance(each, EarlyStopping))
        self._monitor = self._chosen = self._given or next(of_stopping, None)
        if self._live or (self._live is None and display.is_live(self._stream)):
            loop.on.after_dispatch.append(self._watch)

    @property
    def _n_units(self) -> int | None:
        """The number of units; not stored, because the end of the loop may change."""
        if self._total is None and self._unit == "step" and self._loop is not None:
            return self._loop.n_steps
        return self._total

    @property
    def _stream(self) -> TextIO:
        return display.output() if self._file is None else self._file

    def _watch(self, step: int) -> None:
        # Time runs from step to step: the first step of a span follows compilation or
        # evaluation, and only starts the clock.
        now = self._clock()
        if self._previous is not None:
            self._n_timed += step - self._previous[0]
            self._seconds += now - self._previous[1]
        self._previous = step, now
        if now >= self._next_refresh and self._loop is not None:
            self._draw(step, self._loop.running_metrics())
            self._next_refresh = self._clock() + SECONDS_BETWEEN_REFRESHES

    def _draw(self, step: int, metrics: Mapping[str, float]) -> None:
        label, n, total = self._span(step)
        if self._bar is None:  # A bar without an end has no truth value.
            self._bar = new_bar(self._stream, total)
        speed = self._n_timed / self._seconds if self._seconds else None
        draw(self._bar, self._stream, label, n, total, speed=speed, metrics=metrics)

    def _span(self, step: int) -> tuple[str, int, int | None]:
        """Returns the label of the bar, the position of the step in it, and its length."""
        if self._unit == "step" or self._loop is None:
            return "Step", step, self._n_units
        label = f"{self._unit.capitalize()} {display.place(self._n + 1, self._n_units)}"
        length = self._loop.n_steps_per_checkpoint
        if length >= ENDLESS:
            length = self._last.n_completed_steps if self._last else None
        return label, step - self._bar_start, length

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        now, metrics = self._clock(), checkpoint.scalars
        if self._began is None:
            self._began = now - checkpoint.elapsed_time - checkpoint.compile_time
        # Drop the borrowed arrays.
        self._last = checkpoint.replace(state=None, last_grads=None)
        self._previous = None
        self._n = checkpoint.step if self._unit == "step" else self._n + 1
        self._bar_start = checkpoint.step
        is_finite = math.isfinite(metrics.get("loss", 0.0))
        self._not_finite_since = None if is_finite else self._not_finite_since or self._n
        is_best = self._is_best(checkpoint, metrics)
        self._close_bar()  # The next refresh draws a new bar below the line.
        stream, monitor = self._stream, self._monitor and self._monitor.name
        lines = self._table.rows(
            display.place(self._n, self._n_units),
            checkpoint.elapsed_time,
            metrics,
            best=monitor if is_best else None,
            monitor=monitor,
            width=display.width_of(stream),
            colour=display.has_colour(stream),
        )
        display.write("\n".join(lines), stream, fold=False)
        return checkpoint

    def _is_best(self, checkpoint: Checkpoint, metrics: Mapping[str, float]) -> bool:
        if self._monitor is None:
            name = default_monitor(metrics, checkpoint.modes)
            self._monitor = None if name is None else Monitor(name, self._mode, "ProgressBar")
        if self._monitor is None or self._monitor.name not in checkpoint.metrics:
            return False
        value, best = self._monitor.read(checkpoint), self._best and self._best[0]
        if value is None or not self._monitor.is_better(value, best):
            return False
        self._best = value, self._n
        return True

    def get_state(self) -> dict[str, Json]:
        name = None if self._monitor is None else self._monitor.name
        return {"monitor": name, "best": self._best}

    def set_state(self, state: Mapping[str, Json]) -> None:
        """Restores the result of `get_state` if it is for the same metric; call after `attach`."""
        if state["best"] is None or (self._chosen and self._chosen.name != state["monitor"]):
            return
        self._monitor = self._chosen or Monitor(state["monitor"], self._mode, "ProgressBar")
        self._best = state["best"][0], state["best"][1]

    def recall(self, history: History) -> None:
        """Continues after the epochs of a resumed run, with their best value."""
        self._n = self._start = history.n_epochs
        chosen = self._chosen
        monitor = chosen.name if chosen else default_monitor(history, history.modes)
        if monitor is None or not any(map(math.isfinite, history.get(monitor, ()))):
            return
        best = history.best(monitor, chosen.mode if chosen else self._mode)
        self.set_state(
            {"monitor": monitor, "best": (best.value, history.initial_epoch + best.epoch)}
        )

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def interrupt(self) -> None:
        """Removes the bar, and writes no last line: the interrupt's message is the last."""
        self._close_bar()
        self._last = self._began = None

    def close(self) -> None:
        """Removes the bar and writes a line about how training ended."""
        self._close_bar()
        if self._last is None or self._began is None:
            return
        lines = display.final_lines(
            self._clock() - self._began,
            self._last.scalars,
            *self._endings(),
            unit=self._unit,
            n=self._n,
            total=self._n_units,
            monitor=None if self._monitor is None else self._monitor.name,
            best=self._best,
            not_finite_since=self._not_finite_since,
        )
        display.write("\n".join(lines), self._stream)
        self._last = self._began = None

    def _endings(self) -> list[str]:
        """Returns the callbacks' lines on why training stopped and what was restored."""
        callbacks = () if self._loop is None else self._loop.callbacks
        said = [line for each in callbacks for line in getattr(owner_of(each), "endings", ())]
        is_asked = self._last is not None and self._last.stop and self._not_finite_since is None
        return said or ["a callback asked to stop"] * is_asked
