"""Single numbers of how well predicted classes agree with actual ones, from counts by class."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flaxfit.metrics._confusion import confusion_matrix
from flaxfit.metrics._counts import Counts, count_answers, counts_of, micro
from flaxfit.metrics._metric import Metric, ratio
from flaxfit.metrics._rates import Threshold, by_thresholds
from flaxfit.metrics._validity import warn_of
from flaxfit.tree import Array, ArrayLike, Sums


def _of_counts(name: str, value: Callable[[Counts], ArrayLike], **options: Any) -> Metric:
    count = count_answers(name, **options)

    def measure(outputs: Array, targets: Array, *, weights: Array | None = None) -> Sums:
        return count(outputs, targets, weights)[2]

    return Metric(measure, lambda sums: value(counts_of(sums, name)), name)


def _agreement(name: str, value: Callable[[Counts], ArrayLike]) -> Metric:
    """Makes a metric over all classes; with several labels, over the classes "yes" and "no".

    Its options are `threshold`, `from_logits` and `multilabel`, as of `precision`.
    """

    def configure(
        *, threshold: float | None = None, from_logits: bool = True, multilabel: bool = False
    ) -> Metric:
        def of(counts: Counts) -> ArrayLike:
            if multilabel:
                tp, fp, fn, tn = micro(counts)
                yes_and_no = [tp, tn], [fp, fn], [fn, fp], [tn, tp]
                counts = Counts(*map(np.array, yes_and_no))
            return value(counts)

        options = {"threshold": threshold, "from_logits": from_logits, "multilabel": multilabel}
        return dataclasses.replace(_of_counts(name, of, **options), configure=configure)

    return configure()


def _mean_recall(counts: Counts) -> ArrayLike:
    actual = np.add(counts.tp, counts.fn)
    return np.asarray(ratio(counts.tp, actual))[actual != 0].mean().item()


balanced_accuracy: Metric = _agreement("balanced_accuracy", _mean_recall)
"""The mean recall of the classes that occur."""


def _correlation(counts: Counts) -> ArrayLike:
    actual, predicted = np.add(counts.tp, counts.fn), np.add(counts.tp, counts.fp)
    n = actual.sum()
    shared = n * np.sum(counts.tp) - actual @ predicted
    spreads = (n**2 - actual @ actual) * (n**2 - predicted @ predicted)
    return ratio(shared, np.sqrt(np.maximum(spreads, 0)), 0.0 * n)


mcc: Metric = _agreement("mcc", _correlation)
"""Matthews' correlation of actual and predicted classes (Gorodkin 2004); 0 if either is constant.

1 if all predictions are correct, 0 for chance agreement, negative if worse than chance.
"""


def _kappa(
    *,
    kappa_weights: str | None = None,
    threshold: float | None = None,
    from_logits: bool = True,
) -> Metric:
    if kappa_weights not in (None, "linear", "quadratic"):
        raise ValueError(
            "The kappa_weights of 'cohen_kappa' must be 'linear', 'quadratic' or None, got "
            f"{kappa_weights!r}."
        )
    name, options = "cohen_kappa", {"threshold": threshold, "from_logits": from_logits}
    if kappa_weights is None:
        metric = _of_counts(name, _unweighted_kappa, **options)
        return dataclasses.replace(metric, configure=_kappa)
    power = {"linear": 1, "quadratic": 2}[kappa_weights]

    def compute(sums: Sums) -> ArrayLike:
        warn_of(sums["doubts"], name)
        matrix = np.asarray(sums["matrix"], np.float64)
        places = np.arange(len(matrix))
        costs = np.abs(places[:, None] - places) ** power
        by_chance = np.outer(matrix.sum(1), matrix.sum(0)) / (matrix.sum() or np.nan)
        return 1 - ratio((costs * matrix).sum(), (costs * by_chance).sum())

    matrix = confusion_matrix(threshold=threshold, from_logits=from_logits)
    return Metric(matrix.measure, compute, name, _kappa)


def _unweighted_kappa(counts: Counts) -> ArrayLike:
    actual, predicted = np.add(counts.tp, counts.fn), np.add(counts.tp, counts.fp)
    n = actual.sum()
    by_chance = actual @ predicted / n
    return ratio(np.sum(counts.tp) - by_chance, n - by_chance)


cohen_kappa: Metric = _kappa()
"""Agreement of actual and predicted classes beyond chance; at most 1, NaN for a single class.

With `kappa_weights="linear"` or `"quadratic"`, the penalty grows with the distance of the classes,
as for ordinal grades.
"""


def _binary_iou(
    *,
    class_id: int | Sequence[int] = (0, 1),
    threshold: float | None = None,
    from_logits: bool = True,
) -> Metric:
    classes = np.atleast_1d(class_id).tolist()
    if unknown := [i for i in classes if i not in (0, 1)]:
        raise ValueError(f"The metric 'binary_iou' has no class {unknown[0]}: there are 0 and 1.")

    def value(counts: Counts) -> ArrayLike:
        union = np.add(np.add(counts.tp, counts.fp), counts.fn)
        chosen = [i for i in classes if union[i] != 0]
        return (counts.tp[chosen] / union[chosen]).mean().item() if chosen else 0.0

    options = {"average": "binary", "threshold": threshold, "from_logits": from_logits}
    return dataclasses.replace(_of_counts("binary_iou", value, **options), configure=_binary_iou)


binary_iou: Metric = _binary_iou()
"""The mean of `iou` over "no" and "yes", for masks: outputs and targets of one shape.

With `class_id=[1]` it is the IoU of "yes".
"""


def _number_of(name: str, part: str) -> Metric:
    """Makes a metric that counts, by weight: see `precision` for its options.

    Of two classes it counts class 1; of more, or of several labels, all of them together. With
    `average=None` it is an array, by class.
    """

    def configure(
        *,
        average: str | None = "micro",
        threshold: Threshold = None,
        from_logits: bool = True,
        multilabel: bool = False,
        class_id: int | None = None,
    ) -> Metric:
        if average not in ("micro", None):
            raise ValueError(f"The average of {name!r} must be 'micro' or None, got {average!r}.")

        def value(counts: Counts) -> ArrayLike:
            by_class = np.asarray(getattr(counts, part))
            if class_id is not None:
                return by_class[class_id].item()
            if average is None:
                return by_class
            is_binary = len(by_class) == 2 and not multilabel
            return by_class[1].item() if is_binary else by_class.sum().item()

        options = {"from_logits": from_logits, "multilabel": multilabel, "class_id": class_id}
        make = functools.partial(_of_counts, name, value, **options)
        return by_thresholds(lambda one: make(threshold=one), threshold, configure)

    return configure()


true_positives: Metric = _number_of("true_positives", "tp")
"""The weight of the elements that have the label and are predicted to have it."""

false_positives: Metric = _number_of("false_positives", "fp")
"""The weight of the elements that lack the label and are predicted to have it."""

true_negatives: Metric = _number_of("true_negatives", "tn")
"""The weight of the elements that lack the label and are predicted to lack it."""

false_negatives: Metric = _number_of("false_negatives", "fn")
"""The weight of the elements that have the label and are predicted to lack it."""
