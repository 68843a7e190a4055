"""The learning rate range test."""

import dataclasses
import math
from typing import Any

import numpy as np

from flaxfit.display import html, pyplot, sparkline, svg_chart
from flaxfit.loop import EndOfData, TrainLoop
from flaxfit.optim._hyperparams import learning_rates

_SMOOTHING = 0.9
"""The decay of the bias-corrected moving average of the losses."""
_DIVERGED = 4.0
"""The test ends when the loss exceeds its lowest value by this factor."""
_MOST_SKIPPED = 40
"""The number of skipped steps in a row after which the loss counts as diverged."""


@dataclasses.dataclass(frozen=True)
class LearningRateRange:
    """The result of a learning rate range test; it can be plotted, and notebooks show a chart.

    >>> found = LearningRateRange([0.1, 1.0, 10.0], [2.0, 1.0, 5.0], 0.5)
    >>> found
    LearningRateRange(suggestion=0.5, 3 rates from 0.1 to 10 ▃▁█)
    """

    rates: list[float]
    """The rates that were tried."""
    losses: list[float]
    """The smoothed loss at each of them."""
    suggestion: float
    """The rate at which the loss was halfway to its lowest."""

    @property
    def _span(self) -> str:
        return f"{len(self.rates)} rates from {self.rates[0]:.4g} to {self.rates[-1]:.4g}"

    def __repr__(self) -> str:
        shown = f"{self._span} {sparkline(self.losses)}"
        return f"LearningRateRange(suggestion={self.suggestion:.4g}, {shown})"

    def _repr_html_(self) -> str:
        chart = svg_chart("log10 of the rate", {"loss": self.losses}, np.log10(self.rates).tolist())
        title = f"suggested learning rate: {self.suggestion:.4g}"
        return html.card(title, [self._span], f"<div>{chart}</div>")

    def plot(self) -> Any:
        """Draws the loss over the rate with the suggestion; returns the matplotlib axes."""
        _, axes = pyplot().subplots(layout="constrained")
        axes.plot(self.rates, self.losses)
        axes.axvline(self.suggestion, linestyle="--", label=f"suggested {self.suggestion:.3g}")
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss (smoothed)")
        axes.legend()
        return axes


def check_range(lowest: float, highest: float, n_steps: int) -> None:
    """Checks the arguments of a range test, before a loop is made for it."""
    if not 0 < lowest < highest:
        raise ValueError(
            f"find_lr needs 0 < lowest < highest, got lowest={lowest} and highest={highest}."
        )
    if n_steps < 10:
        raise ValueError(f"find_lr needs 10 steps or more to see a slope, got n_steps={n_steps}.")


def find_lr(loop: TrainLoop, *, lowest: float, highest: float, n_steps: int) -> LearningRateRange:
    """Multiplies the rate by the same factor after each step, until the loss diverges.

    After L. N. Smith, Cyclical Learning Rates for Training Neural Networks, 2017, section 3.3.
    """
    if not learning_rates(loop.hyperparams):
        raise ValueError(
            "find_lr cannot set the learning rate of this optimizer. Make the optimizer with "
            "flaxfit.optim.OptimizerDef(optax.adam, learning_rate=1e-3)."
        )
    rates: list[float] = []
    losses: list[float] = []
    average = 0.0
    for rate in np.geomspace(lowest, highest, n_steps).tolist():
        loop.set_hyperparams(learning_rate=rate)
        try:
            loss = _loss(loop)
        except EndOfData:
            break
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        smooth = average / (1 - _SMOOTHING ** (len(rates) + 1))
        if not math.isfinite(smooth) or (losses and smooth > _DIVERGED * min(losses)):
            break
        rates.append(rate)
        losses.append(smooth)
    if len(rates) < 3:
        raise ValueError(
            f"find_lr tried only {len(rates)} rates before the loss diverged or the data ended: "
            "lower `lowest`, or pass more data."
        )
    return LearningRateRange(rates, losses, _suggest(rates, losses))


def _loss(loop: TrainLoop) -> float:
    """Trains until a step is not skipped: float16 skips steps until it has found its scale."""
    for _ in range(_MOST_SKIPPED):
        checkpoint = loop.next_step()
        if not checkpoint.metrics.get("skipped_steps"):
            return checkpoint.loss
    return math.nan


def _suggest(rates: list[float], losses: list[float]) -> float:
    """Returns the rate at which the loss was halfway from its start to its lowest.

    The loss falls about fastest there, and unlike the slope, this point is robust to noise.
    """
    lowest = int(np.argmin(losses))
    start = float(np.median(losses[: max(1, len(losses) // 10)]))
    if losses[lowest] >= start:
        raise ValueError(
            f"The loss has not fallen at any rate from {rates[0]:.4g} to {rates[-1]:.4g}: lower "
            "`lowest`, or try more steps (n_steps)."
        )
    half = (start + losses[lowest]) / 2
    return next(rates[i] for i in range(lowest, -1, -1) if i == 0 or losses[i - 1] > half)
