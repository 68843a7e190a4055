"""Correlations and explained variance, from sums."""

import numpy as np

from flaxfit.metrics._metric import Metric, ratio, weights_of
from flaxfit.metrics._moments import moments, spread
from flaxfit.metrics._regression import check_numbers
from flaxfit.tree._types import Array, Sums


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
        if name == "concordance":
            weight, total = np.asarray(sums["errors"], np.float64)[:2].sum(1)
            spreads = found["outputs"] + found["targets"] + total**2 / np.maximum(weight, 1e-30)
            return float(np.mean(np.asarray(ratio(2 * shared, spreads))))
        product = np.sqrt(found["outputs"] * found["targets"])
        return float(np.mean(np.asarray(ratio(shared, product))))

    return Metric(measure, compute, name, mode="max")


explained_variance = _of_spreads("explained_variance", "errors", "targets")
"""One minus the variance of the errors over that of the targets, averaged over several outputs."""

pearson = _of_spreads("pearson", "outputs", "targets", "sums", "errors")
"""The correlation of outputs and targets, averaged over several outputs; NaN of a constant."""

concordance = _of_spreads("concordance", "outputs", "targets", "sums", "errors")
"""The correlation times how far the means and the spreads agree (Lin 1989); NaN of two constants.

It is 1 only where outputs equal targets. Averaged over several outputs.
"""
