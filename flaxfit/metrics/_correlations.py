"""Correlations and explained variance, from sums."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.metrics._metric import Metric, mean, ratio, weights_of
from flaxfit.metrics._moments import moments, spread
from flaxfit.metrics._regression import check_numbers
from flaxfit.tree._types import Array, ArrayLike, Function, Sums


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


def _correlation(name: str, of_rows: Function) -> Metric:
    """Makes a correlation over the examples, or along an axis of each example."""

    def configure(*, axis: int = 0) -> Metric:
        if axis == 0:
            over_all = _of_spreads(name, "outputs", "targets", "sums", "errors")
            return dataclasses.replace(over_all, configure=configure)

        def values(outputs: ArrayLike, targets: ArrayLike) -> jax.Array:
            outputs, targets = check_numbers(outputs, targets)
            means = outputs.mean(axis, keepdims=True), targets.mean(axis, keepdims=True)
            one, other = outputs - means[0], targets - means[1]
            shared, *squares = (
                (a * b).mean(axis) for a, b in ((one, other), (one, one), (other, other))
            )
            return of_rows(shared, *squares, (means[0] - means[1]).squeeze(axis))

        return dataclasses.replace(mean(values, name=name), mode="max", configure=configure)

    return configure()


pearson = _correlation("pearson", lambda shared, a, b, _: shared / jnp.sqrt(a * b))
"""The correlation of outputs and targets, averaged over several outputs; NaN of a constant.

With `axis=-1`, as in Keras, it is that of each example along this axis, and their mean.
"""

concordance = _correlation(
    "concordance", lambda shared, a, b, offset: 2 * shared / (a + b + jnp.square(offset))
)
"""The correlation times how far the means and the spreads agree (Lin 1989); NaN of two constants.

It is 1 only where outputs equal targets. Averaged over several outputs; with `axis=-1`, as in
Keras, it is that of each example along this axis, and their mean.
"""
