"""Correlations and explained variance, from sums."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.metrics._metric import Metric, mean, ratio, weights_of
from flaxfit.metrics._moments import moments, offset, spread
from flaxfit.metrics._regression import check_numbers
from flaxfit.tree import Array, ArrayLike, Function, Sums


def _explained_variance() -> Metric:
    def measure(outputs: Array, targets: Array, *, weights: Array | None = None) -> Sums:
        outputs, targets = check_numbers(outputs, targets)
        weights = weights_of(outputs, weights)
        columns = {"errors": outputs - targets, "targets": targets}
        return {name: moments(column, weights) for name, column in columns.items()}

    def compute(sums: Sums) -> float:
        errors, total = spread(sums["errors"]), spread(sums["targets"])
        otherwise = np.where(errors == 0, 0.0, np.where(np.isnan(errors), np.nan, 1.0))
        return float(np.mean(1 - np.asarray(ratio(errors, total, otherwise))))

    return Metric(measure, compute, "explained_variance")


explained_variance: Metric = _explained_variance()
"""`1 - var(targets - outputs) / var(targets)`, averaged over several outputs."""


def _correlation(name: str, of_spreads: Function) -> Metric:
    """Makes a correlation over the examples, or along an axis of each example."""

    def measure(outputs: Array, targets: Array, *, weights: Array | None = None) -> Sums:
        outputs, targets = check_numbers(outputs, targets)
        weights = weights_of(outputs, weights)
        return {
            "outputs": moments(outputs, weights),
            "targets": moments(targets, weights),
            "both": moments(outputs, weights, targets),
        }

    def compute(sums: Sums) -> float:
        spreads = (spread(sums[part]) for part in ("both", "outputs", "targets"))
        return float(np.mean(np.asarray(ratio(*of_spreads(*spreads, offset(sums["both"]))))))

    def configure(*, axis: int = 0) -> Metric:
        if axis == 0:
            return Metric(measure, compute, name, configure)

        def values(outputs: ArrayLike, targets: ArrayLike) -> jax.Array:
            rows = [jnp.moveaxis(each, axis, -1) for each in check_numbers(outputs, targets)]
            away = [each - each.mean(-1, keepdims=True) for each in rows]
            # Again: the first mean is rounded to the precision of the (large) numbers.
            away = [each - each.mean(-1, keepdims=True) for each in away]
            apart = (rows[0] - rows[1]).mean(-1, keepdims=True) + jnp.zeros_like(rows[0])
            numbers = jnp.stack([*away, apart])
            one, other, apart = numbers / jnp.abs(numbers).max((0, -1))[..., None]
            pairs = (one, other), (one, one), (other, other), (apart, apart)
            top, bottom = of_spreads(*((a * b).mean(-1) for a, b in pairs))
            return top / bottom

        return dataclasses.replace(mean(values, name=name), configure=configure)

    return configure()


pearson: Metric = _correlation("pearson", lambda both, a, b, _: (both, a**0.5 * b**0.5))
"""The correlation of outputs and targets, averaged over several outputs; NaN of a constant.

With `axis=-1`, as in Keras, it is the mean over examples of the correlation along this axis.
"""

concordance: Metric = _correlation(
    "concordance", lambda both, a, b, apart: (2 * both, a + b + apart)
)
"""`2 cov(o, t) / (var(o) + var(t) + (mean(o) - mean(t))**2)` (Lin 1989); NaN of two constants.

It is 1 only if outputs equal targets. It is averaged over several outputs; with `axis=-1`, as in
Keras, it is the mean over examples of the value along this axis.
"""
