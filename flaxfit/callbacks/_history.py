"""History: the metrics of each checkpoint of a run, as lists by name."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from flaxfit.display import duration, html, number, plural, pyplot, sparkline, svg_chart
from flaxfit.metrics._monitor import default_monitor, is_better, known_mode, resolve_mode
from flaxfit.state import Checkpoint
from flaxfit.tree import Json


class Best(NamedTuple):
    """The best value of a metric, with its epoch and step."""

    value: float
    epoch: int
    """The position in the history, from 1: the epoch for `fit`, else the checkpoint."""
    step: int


class History(Mapping[str, list[float]]):
    """Holds the metrics of a run: name -> one value per checkpoint, nan if it had none.

    `append` is also a callback: `TrainLoop(..., callbacks=[history.append])`.

    >>> history = History()
    >>> for step, loss in (1, 0.9), (2, 0.4), (3, 0.5):
    ...     history.append(Checkpoint(step=step, state=None, metrics={"loss": loss}))
    >>> history["loss"], history.steps
    ([0.9, 0.4, 0.5], [1, 2, 3])
    >>> history.best("loss")
    Best(value=0.4, epoch=2, step=2)

    Args:
      name: the name of the model, used as the title.
      unit: the word for one entry ("epoch").
      facts: a line about the run, shown in notebooks.
      initial_epoch: the number of epochs before the first entry.
    """

    borrows = True

    def __init__(
        self,
        name: str = "",
        *,
        unit: str = "checkpoint",
        facts: str = "",
        initial_epoch: int = 0,
    ) -> None:
        self.name: str = name
        self.unit: str = unit
        self.facts: str = facts
        self.initial_epoch: int = initial_epoch
        self.first_step: int | None = None
        """The step at which `fit` was called; None: the history of a loop."""
        self.steps: list[int] = []
        """The step of each checkpoint."""
        self.n_steps: int = 0
        """The number of updates."""
        self.elapsed_time: float = 0.0
        """Seconds of training, compilation excluded."""
        self.compile_time: float = 0.0
        """Seconds of compilation."""
        self.params: dict[str, int | str | None] = {}
        """Arguments of `fit`: "verbose", "epochs" and the "steps" of each, if known."""
        self.modes: dict[str, str | None] = {}
        """"min" or "max" by metric, where that is known."""
        self._values: dict[str, list[float]] = {}

    def append(self, checkpoint: Checkpoint) -> None:
        """Adds the metrics of a checkpoint.

        >>> history.append(Checkpoint(step=4, state=None, metrics={"loss": 0.6}))
        >>> history.steps[-1]
        4
        """
        metrics = checkpoint.scalars
        for name in metrics:
            self._values.setdefault(name, [math.nan] * len(self.steps))
        for name, values in self._values.items():
            values.append(float(metrics.get(name, math.nan)))
        self.modes |= checkpoint.modes
        self.steps.append(checkpoint.step)
        self.n_steps += checkpoint.n_completed_steps
        self.elapsed_time += checkpoint.elapsed_time
        self.compile_time += checkpoint.compile_time

    def __getitem__(self, name: str) -> list[float]:
        if name not in self._values:
            raise KeyError(f"The history has no {name!r}; it holds {self._held()}.")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def n_epochs(self) -> int:
        """The number of epochs, including any before the first entry."""
        return self.initial_epoch + len(self.steps)

    @property
    def epoch(self) -> list[int]:
        """The index of each epoch, from 0 as in Keras, or from `initial_epoch`."""
        return list(range(self.initial_epoch, self.n_epochs))

    @property
    def history(self) -> dict[str, list[float]]:
        """The metrics as a dict of lists."""
        return self._values

    def best(self, name: str, mode: str = "auto") -> Best:
        """Returns the best finite value of a metric, the earliest among equals.

        >>> history.best("loss").value
        0.4

        Args:
          name: the metric.
          mode: "min", "max", or "auto", for the metrics and losses of flaxfit and of Optax.

        Raises:
          KeyError: the metric is unknown.
          ValueError: no value is finite, or it is not known which values of the metric are better.
        """
        values, best = self[name], None
        mode = resolve_mode(name, mode, self.modes)
        for i, value in enumerate(values):
            if is_better(value, best.value if best else None, mode):
                best = Best(value, i + 1, self.steps[i])
        if best is None:
            raise ValueError(f"{name!r} has no best value: none of its values is finite.")
        return best

    def to_pandas(self) -> Any:
        """Returns a data frame with a column per metric, indexed by step.

        >>> import pandas
        >>> list(history.to_pandas().columns)
        ['loss']
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas needs pandas: pip install pandas") from error
        return pandas.DataFrame(dict(self), index=pandas.Index(self.steps, name="step"))

    def plot(self) -> list[Any]:
        """Draws every metric over the epochs or steps, training and validation together.

        >>> import matplotlib.pyplot as plt
        >>> [axes.get_title() for axes in history.plot()]
        ['loss']
        >>> plt.close()

        Returns:
          The matplotlib axes, one per metric (`axes[0].figure.savefig(...)`).
        """
        charts = self._charts()
        n = max(len(charts), 1)
        _, axes = pyplot("(print(history) draws without it)").subplots(
            1, n, figsize=(4 * n, 3), squeeze=False, layout="constrained"
        )
        for axis, (title, names) in zip(axes[0], charts.items(), strict=False):
            self._draw(axis, title, names)
            axis.legend()
        return list(axes[0])

    def plot_lr(self) -> Any:
        """Draws the learning rate over the epochs or steps, or that of each group of the optimizer.

        >>> import matplotlib.pyplot as plt
        >>> history = History()
        >>> history.append(Checkpoint(step=1, state=None, metrics={"learning_rate": 0.1}))
        >>> history.plot_lr().get_title()
        'learning rate'
        >>> plt.close()

        Returns:
          The matplotlib axes (`axes.set_yscale("log")`, `axes.figure.savefig(...)`).

        Raises:
          ValueError: no learning rate was reported.
        """
        names = [name for name in self if name.split("/")[0] == "learning_rate"]
        if not names:
            raise ValueError(
                f"There is no learning rate to plot: the history holds {self._held()}. It is "
                "recorded if the optimizer's state holds it, as a number or a schedule: make the "
                "optimizer with flaxfit.optim.OptimizerDef(optax.adam, learning_rate=1e-3)."
            )
        _, axes = pyplot("(history['learning_rate'] has the numbers)").subplots(
            figsize=(4, 3), layout="constrained"
        )
        self._draw(axes, "learning rate", names)
        if len(names) > 1:
            axes.legend()
        return axes

    def _draw(self, axes: Any, title: str, names: Iterable[str]) -> None:
        unit, places = self._places
        for name in names:
            axes.plot(places, self[name], marker=".", label=name)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set(title=title, xlabel=unit)

    def get_state(self) -> dict[str, Json]:
        """Returns the history as plain JSON (a value that is not finite is a string)."""
        values = {
            name: [value if math.isfinite(value) else str(value) for value in values]
            for name, values in self._values.items()
        }
        return {
            "first_step": self.first_step,
            "steps": list(self.steps),
            "values": values,
            "n_steps": self.n_steps,
            "elapsed_time": self.elapsed_time,
            "compile_time": self.compile_time,
            "modes": dict(self.modes),
            "initial_epoch": self.initial_epoch,
        }

    def set_state(self, state: Mapping[str, Json]) -> None:
        self.first_step = state.get("first_step")
        self.steps = [int(step) for step in state["steps"]]
        self._values = {
            name: [float(value) for value in values] for name, values in state["values"].items()
        }
        self.n_steps = int(state["n_steps"])
        self.elapsed_time = float(state["elapsed_time"])
        self.compile_time = float(state["compile_time"])
        self.modes = dict(state.get("modes", {}))
        self.initial_epoch = int(state.get("initial_epoch", 0))

    @property
    def _places(self) -> tuple[str, list[int]]:
        """The unit and the numbers of the entries: epochs from 1 for `fit`, else steps."""
        if self.unit == "epoch":
            return "epoch", [n + 1 for n in self.epoch]
        return "step", self.steps

    def _held(self) -> str:
        return ", ".join(self._values) or "nothing yet"

    def _title(self) -> str:
        title = f"{plural(len(self.steps), self.unit)}, {plural(self.n_steps, 'step')} in "
        title += duration(self.elapsed_time + self.compile_time)
        return f"{self.name}: {title}" if self.name else title

    def _charts(self) -> dict[str, list[str]]:
        """Groups the metrics by chart, training with validation; the loss and pairs come first."""
        charts: dict[str, list[str]] = {}
        for name in self:
            charts.setdefault(name.removeprefix("val_"), []).append(name)
        return dict(sorted(charts.items(), key=lambda chart: (chart[0] != "loss", -len(chart[1]))))

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        lines = [self._title()]
        for name, values in self.items():
            ends = f"{number(values[0])} → {number(values[-1])}"
            lines.append(f"  {name:<{width}}  {sparkline(values)}  {ends}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        unit, places = self._places
        facts = [self.facts, f"compiled in {duration(self.compile_time)}"]
        monitor = default_monitor(self, self.modes)
        if monitor is not None and any(map(math.isfinite, self[monitor])):
            best = self.best(monitor)
            facts.append(f"best {monitor} {number(best.value)} at {unit} {places[best.epoch - 1]}")
        charts = [
            svg_chart(title, {name: self[name] for name in names}, places, unit)
            for title, names in list(self._charts().items())[:2]
        ]
        rows = []
        for name, values in self.items():
            row = [name, number(values[0]), number(values[-1]), "", ""]
            if any(map(math.isfinite, values)) and known_mode(name, self.modes):
                best = self.best(name)
                row[3:] = number(best.value), str(places[best.epoch - 1])
            rows.append(row)
        numbers = html.table(rows, head=["", "first", "last", "best", f"at {unit}"])
        return html.card(self._title(), facts, f"<div>{''.join(charts)}</div>", numbers)
