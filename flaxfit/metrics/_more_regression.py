"""Correlations, explained variance and quantile losses, from sums."""

import jax.numpy as jnp
import numpy as np

from flaxfit.metrics._metric import Metric, mean, ratio, weights_of
from flaxfit.metrics._moments import moments, spread
from flaxfit.metrics._regression import check_numbers
from flaxfit.tree._types import Array, ArrayLike, Sums


def _of_spreads(name: str, *parts: str) -> Metric:
    """Makes a metric of the spreads of the targets, the outputs, their sums and differences."""

    def measure(outputs: Array, targets: Array, *, weights: Array | None = None) -> Sums:
        outputs, targets = check_numbers(outputs, targets)
        weights = weights_of(outputs, weights)
        columns = (outputs, targets, outputs + targets, outputs - targets)
        names = ("outputs", "targets", "sums", "errors")
        return {part: moments(columns[names.index(part)], weights) for part in parts}

    def compute(sums: Sums) -> float:
        found = {part: spread(sums[part]) for part in parts}
        if name == "explained_variance":
            errors, total = found["errors"], found["targets"]
            otherwise = np.where(errors == 0, 0.0, np.where(np.isnan(errors), np.nan, 1.0))
            return float(np.mean(1 - np.asarray(ratio(errors, total, otherwise))))
        shared = (found["sums"] - found["errors"]) / 4
        product = np.sqrt(found["outputs"] * found["targets"])
        return float(np.mean(np.asarray(ratio(shared, product))))

    return Metric(measure, compute, name, mode="max")


explained_variance = _of_spreads("explained_variance", "errors", "targets")
"""One minus the variance of the errors over that of the targets, averaged over several outputs."""

pearson = _of_spreads("pearson", "outputs", "targets", "sums", "errors")
"""The correlation of outputs and targets, averaged over several outputs; NaN of a constant."""


def _quantile_loss(*, quantile: float = 0.5) -> Metric:
    if not 0 <= quantile <= 1:
        raise ValueError(f"The quantile must lie between 0 and 1, got {quantile}.")

    def pinball(outputs: ArrayLike, targets: ArrayLike) -> Array:
        outputs, targets = check_numbers(outputs, targets)
        above = targets - outputs
        return jnp.maximum(quantile * above, (quantile - 1) * above)

    metric = mean(pinball, name="quantile_loss")
    return Metric(metric.measure, metric.compute, metric.name, _quantile_loss, mode="min")


quantile_loss = _quantile_loss()
"""The mean pinball loss: errors below the target count `quantile` times, others the rest.

With `quantile=0.5`, as it is unless given, it is half the mean absolute error.
"""
