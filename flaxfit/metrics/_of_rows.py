"""Built-in metrics of all rows at once: curves of scores, ranks, medians and extremes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from flaxfit.metrics._labels import binary_scores
from flaxfit.metrics._metric import Metric, ratio, weights_of
from flaxfit.metrics._regression import check_numbers
from flaxfit.metrics._rows import collecting
from flaxfit.metrics._scores import Ranked
from flaxfit.metrics._validity import counted_weights, warn_of
from flaxfit.tree import Array, ArrayLike, Function

Rows = Callable[[np.ndarray, np.ndarray, np.ndarray], ArrayLike]
"""`(outputs, targets, weights) -> value`, over the flat elements of nonzero weight."""


def _pair(name: str, prepare: Function, value: Rows, configure: Function | None = None) -> Metric:
    """Makes a collected metric of the elements of `prepare(outputs, targets, weights=None)`."""
    return collecting(name, prepare, functools.partial(_of_weight, value), configure)


def _of_weight(value: Rows, outputs: Any, targets: Any, weights: Any) -> ArrayLike:
    """Returns the value over the elements of nonzero weight; NaN if none, or if one is NaN."""
    chosen = weights != 0
    found = outputs[chosen], targets[chosen], weights[chosen]
    if not chosen.any() or any(np.isnan(each).any() for each in found):
        return np.nan
    return value(*(each.astype(float) for each in found))


def _numbers(outputs: Array, targets: Array, *, weights: Array | None = None) -> tuple[Any, Array]:
    outputs, targets = check_numbers(outputs, targets)
    return (outputs, targets), weights_of(outputs, weights)


def _scores(
    name: str, outputs: Array, targets: Array, *, weights: Array | None = None
) -> tuple[Any, Array]:
    found = binary_scores(outputs, targets, name=name)
    counted, _ = counted_weights(found, weights)
    return (found.outputs, jnp.asarray(found.actual, jnp.float32)), counted


def _curve(scores: ArrayLike, labels: ArrayLike, weights: ArrayLike) -> tuple[np.ndarray, ...]:
    """Returns the weights of true and false positives at each threshold, highest first."""
    order = np.argsort(-scores, kind="stable")
    scores, labels, weights = scores[order], labels[order], weights[order]
    last = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)
    return np.cumsum(weights * labels)[last], np.cumsum(weights * (1 - labels))[last]


def _by_column(ranked: Ranked, value: Rows, configure: Function, reduce: Function) -> Metric:
    """Makes a metric that reduces the values of the classes or labels to one."""

    def prepare(
        outputs: Array, targets: Array, *, weights: Array | None = None
    ) -> tuple[Any, Array]:
        found = ranked.scores(outputs, targets, weights)
        return (found.scores, found.actual, found.is_probable), found.weights

    def of(scores: Any, actual: Any, is_probable: Any, weights: Any) -> ArrayLike:
        n = is_probable.sum()
        warn_of({"labels": 0, "probable": n, "improbable": is_probable.size - n}, ranked.name)
        columns = (each.reshape(-1, each.shape[-1]).T for each in (scores, actual, weights))
        columns = [each.astype(float) for each in columns]
        values = [_of_weight(value, *each) for each in zip(*columns, strict=True)]
        return reduce(values, (columns[1] * columns[2]).sum(1))

    return collecting(ranked.name, prepare, of, configure)


def _area(name: str, value: Rows) -> Metric:
    """Makes the area under a curve, of a single score or of each class or label."""

    def configure(
        *,
        average: str | None = "macro",
        multi_class: str | None = None,
        multilabel: bool = False,
        from_logits: bool = True,
        label_weights: Sequence[float] | None = None,
    ) -> Metric:
        ranked = Ranked(name, average, multi_class, multilabel, from_logits, label_weights)
        return _by_column(ranked, value, configure, ranked.averaged)

    return configure()


def _average_precision(scores: Any, labels: Any, weights: Any) -> ArrayLike:
    tp, fp = _curve(scores, labels, weights)
    if not tp[-1]:
        return np.nan
    return float(np.sum(np.diff(tp, prepend=0) * tp / (tp + fp)) / tp[-1])


average_precision: Metric = _area("average_precision", _average_precision)
"""The mean of the precision at each step of the recall, as in scikit-learn: binary labels.

Of several classes or labels with `multi_class`, `multilabel` and `average`, as of `auc`. Classes
that never occur are left out.
"""


def _pr_area(scores: Any, labels: Any, weights: Any) -> ArrayLike:
    tp, fp = _curve(scores, labels, weights)
    if not tp[-1]:
        return np.nan
    precision, recall = tp / (tp + fp), tp / tp[-1]
    return float(np.trapezoid(np.append(1.0, precision), np.append(0.0, recall)))


pr_auc: Metric = _area("pr_auc", _pr_area)
"""The area under the precision-recall curve by trapezoids: as `average_precision`."""


def _best_at(name: str, best: Function, bounded: Function) -> Metric:
    """Makes the best value of one rate over the thresholds at which another meets a bound."""

    def configure(
        *,
        least: float = 0.5,
        class_id: int | None = None,
        multilabel: bool = False,
        from_logits: bool = True,
    ) -> Metric:
        def value(scores: Any, labels: Any, weights: Any) -> ArrayLike:
            tp, fp = (np.append(0.0, each) for each in _curve(scores, labels, weights))
            rates = tp, fp, tp[-1] - tp, fp[-1] - fp
            with np.errstate(all="ignore"):
                reached = bounded(*rates) >= least - 1e-12
                found = best(*rates)[reached]
            return float(np.nanmax(found, initial=0.0))

        if class_id is None and multilabel:
            raise ValueError(
                f"The metric {name!r} measures one label: with multilabel=True pass class_id=0."
            )
        if class_id is None:
            return _pair(name, functools.partial(_scores, name), value, configure)
        ranked = Ranked(name, None, None if multilabel else "ovr", multilabel, from_logits)
        return _by_column(ranked, value, configure, lambda values, _: values[class_id])

    return configure()


def _precision(tp: Any, fp: Any, fn: Any, tn: Any) -> Any:
    return tp / (tp + fp)


def _recall(tp: Any, fp: Any, fn: Any, tn: Any) -> Any:
    return tp / (tp + fn)


def _specificity(tp: Any, fp: Any, fn: Any, tn: Any) -> Any:
    return tn / (tn + fp)


precision_at_recall: Metric = _best_at("precision_at_recall", _precision, _recall)
"""The best precision at any threshold with a recall of at least `least`, 0.5 unless given.

Of several classes `class_id` says which, of several labels with `multilabel=True`, too. With
`from_logits=False` the outputs of classes are probabilities.
"""

recall_at_precision: Metric = _best_at("recall_at_precision", _recall, _precision)
"""The best recall at any threshold with a precision of at least `least`, 0.5 unless given."""

sensitivity_at_specificity: Metric = _best_at("sensitivity_at_specificity", _recall, _specificity)
"""The best recall at any threshold with a specificity of at least `least`, 0.5 unless given."""

specificity_at_sensitivity: Metric = _best_at("specificity_at_sensitivity", _specificity, _recall)
"""The best specificity at any threshold with a recall of at least `least`, 0.5 unless given."""


def _low_median(values: Any, weights: Any) -> Any:
    return np.quantile(values, 0.5, weights=weights, method="inverted_cdf")


def _median(outputs: Any, targets: Any, weights: Any) -> ArrayLike:
    errors = np.abs(outputs - targets)
    return float((_low_median(errors, weights) - _low_median(-errors, weights)) / 2)


median_absolute_error: Metric = _pair("median_absolute_error", _numbers, _median)
"""The weighted median of the absolute errors; between two, their mean."""

max_error: Metric = _pair("max_error", _numbers, lambda o, t, w: float(np.abs(o - t).max()))
"""The largest absolute error."""


def _ranks(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns the weighted rank of each value; equal values get their mean rank."""
    _, places = np.unique(values, return_inverse=True)
    at = np.bincount(places, weights)
    return (np.cumsum(at) - at / 2)[places]


def _spearman(outputs: Any, targets: Any, weights: Any) -> ArrayLike:
    ranks = np.stack([_ranks(outputs, weights), _ranks(targets, weights)])
    away = ranks - np.average(ranks, axis=1, weights=weights)[:, None]
    squares = (weights * away * away).sum(1)
    if not squares.prod():
        return np.nan
    return float((weights * away.prod(0)).sum() / np.sqrt(squares.prod()))


spearman: Metric = _pair("spearman", _numbers, _spearman)
"""Spearman's rank correlation of outputs and targets; ties get their mean rank."""


def _kendall(outputs: Any, targets: Any, weights: Any) -> ArrayLike:
    if np.ptp(weights):
        raise ValueError(
            "The metric 'kendall' counts all examples equally: use weights of 0 and 1, or the "
            "metric 'spearman', which takes any weights."
        )
    from scipy.stats import kendalltau  # Slow to import.

    found: Any = kendalltau(outputs, targets)
    return float(found.statistic)


kendall: Metric = _pair("kendall", _numbers, _kendall)
"""Kendall's tau-b: concordant minus discordant pairs, as a fraction corrected for ties.

NaN of a constant. Examples of weight 0 are left out; other weights must be equal.
"""


def _explained(
    name: str, loss: Function, center: Function, configure: Function | None = None
) -> Metric:
    """Makes `1 - loss(outputs) / loss(best constant)`, averaged over several outputs.

    A loss of 0 gives 1; any other loss gives 0 if the targets are constant.
    """

    def value(outputs: Any, targets: Any, weights: Any) -> ArrayLike:
        best = np.full_like(targets, center(targets, weights))
        losses = (np.average(loss(each, targets), weights=weights) for each in (outputs, best))
        reached, least = losses
        return np.where(reached == 0, 1.0, 1 - ratio(reached, least, 1.0))

    def of(outputs: Any, targets: Any, weights: Any) -> float:
        columns = (each.reshape(len(each), -1).T for each in (outputs, targets, weights))
        return float(np.mean([_of_weight(value, *each) for each in zip(*columns, strict=True)]))

    return collecting(name, _numbers, of, configure)


d2_absolute_error: Metric = _explained("d2_absolute_error", lambda o, t: np.abs(o - t), _low_median)
"""`1 - MAE(outputs) / MAE(median target)`, averaged over several outputs."""


def _d2_tweedie(*, power: float = 0.0) -> Metric:
    if 0 < power < 1:
        raise ValueError(f"No Tweedie distribution has a power between 0 and 1, got {power}.")

    def deviance(outputs: Any, targets: Any) -> Any:
        o, t = outputs, targets
        with np.errstate(all="ignore"):
            if power == 0:
                return (t - o) ** 2
            if power == 1:
                found = np.where(t == 0, 0.0, t * np.log(t / o)) - t + o
            elif power == 2:
                found = np.log(o / t) + t / o - 1
            else:
                a, b = 1 - power, 2 - power
                found = np.maximum(t, 0) ** b / (a * b) - t * o**a / a + o**b / b
        is_valid = (o > 0) & ((t >= 0) if power < 2 else (t > 0)) if power > 0 else o > 0
        return np.where(is_valid, 2 * found, np.nan)

    return _explained("d2_tweedie", deviance, lambda t, w: np.average(t, weights=w), _d2_tweedie)


d2_tweedie: Metric = _d2_tweedie()
"""`1 - D(outputs) / D(mean target)`, D the Tweedie deviance, averaged over several outputs.

Its `power` is 0 (normal, as `r2`) unless given; 1 is Poisson, 2 is gamma. Outputs must be positive
with any other power than 0, and targets where the distribution is: the value is NaN otherwise.
"""
