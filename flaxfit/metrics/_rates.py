"""Metrics computed from counts by class: precision, recall and their relatives."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.metrics._counts import Counts, by_example, count_answers, counts_of, micro
from flaxfit.metrics._metric import Metric, ratio
from flaxfit.metrics._validity import warn_of
from flaxfit.tree import Array, ArrayLike, Function, Sums

Fraction: TypeAlias = Callable[[Counts], tuple[ArrayLike, ArrayLike]]
"""The numerator and the denominator of a rate, by class."""
Threshold: TypeAlias = float | Sequence[float] | np.ndarray | None

_AVERAGES = ("auto", "binary", "macro", "micro", "weighted", "samples", None)


def _rate(name: str, fraction: Fraction, *, default: str = "auto") -> Metric:
    """Makes a metric that averages a ratio of counts over classes.

    The options have their meaning in scikit-learn or Keras:
      average: "binary" (class 1 only), "macro" (the mean over the classes that occur or are
        predicted), "weighted" (their mean weighted by how often they occur), "micro" (the ratio of
        the counts of all classes), "samples" (the mean over the examples, with `multilabel`), or
        None (an array, by class). By default "binary" for two classes, "micro" with `top_k`, and
        "macro" for more.
      threshold: the logit above which class 1 of two is predicted, or one of several labels, or
        the one class of `class_id`. Several of them give an array.
      from_logits: whether the outputs are logits; if not, the threshold is 0.5 unless given.
      multilabel: whether an example may have several labels, or none: outputs and labels have the
        shape `(batch, ..., classes)`, and each class is predicted by its own output.
      top_k: predicts the classes of the k highest scores, instead of one.
      class_id: reports only this class, or the mean over several that occur or are predicted.
      zero_division: the value where the denominator is 0.
      num_classes: the number of classes, where outputs are predicted labels, integers of the shape
        of the targets; checked for other outputs.
      axis: the axis of the classes, in outputs and one-hot targets.
    """

    def configure(
        *,
        average: str | None = default,
        threshold: Threshold = None,
        from_logits: bool = True,
        multilabel: bool = False,
        top_k: int | None = None,
        class_id: int | Sequence[int] | np.ndarray | None = None,
        zero_division: float = 0.0,
        num_classes: int | None = None,
        axis: int = -1,
    ) -> Metric:
        options = {"average": average, "from_logits": from_logits, "multilabel": multilabel}
        options |= {"top_k": top_k, "class_id": class_id}
        _check_options(name, average, multilabel, top_k, class_id, default)

        def make(threshold: float | None) -> Metric:
            of = _sums_and_value(name, fraction, zero_division, threshold=threshold, **options)
            measure, compute = of
            return Metric(_arranged(measure, name, num_classes, axis), compute, name)

        return by_thresholds(make, threshold, configure)

    return configure()


def _sums_and_value(
    name: str, fraction: Fraction, zero_division: float, **options: Any
) -> tuple[Function, Function]:
    count = count_answers(name, **options)
    average, class_id, top_k = (options[each] for each in ("average", "class_id", "top_k"))
    multilabel = options["multilabel"]
    is_several = multilabel or top_k is not None

    def measure(outputs: Array, targets: Array, *, weights: Array | None = None) -> Sums:
        found, weight, sums = count(outputs, targets, weights)
        if average != "samples":
            return sums
        numerator, n = fraction(by_example(found, weight))
        values = jnp.where(n > 0, numerator / jnp.where(n > 0, n, 1), zero_division)
        weight = weight.sum(-1)
        return {"sum": (weight * values).sum(), "n": weight.sum(), "doubts": sums["doubts"]}

    def compute(sums: Sums) -> ArrayLike:
        if average == "samples":
            warn_of(sums["doubts"], name)
            return ratio(sums["sum"], sums["n"])
        counts = counts_of(sums, name)
        by_class = np.asarray(ratio(*fraction(counts), zero_division))
        occurs = counts.tp + counts.fp + counts.fn != 0
        if np.ndim(class_id) > 0:
            chosen = [
                i for i in np.asarray(class_id).tolist() if occurs[_checked(i, by_class, name)]
            ]
            return by_class[chosen].mean().item() if chosen else zero_division
        if class_id is not None:
            return by_class[_checked(class_id, by_class, name)].item()
        if average is None:
            return by_class
        if average == "micro" or average == "auto" and top_k is not None:
            return ratio(*fraction(micro(counts)), zero_division)
        if average == "weighted":
            actual = counts.tp + counts.fn
            return ratio((by_class * actual).sum(), actual.sum(), by_class.sum() * 0)
        if average == "binary" or average == "auto" and len(by_class) == 2 and not is_several:
            return by_class[1].item()
        return by_class[occurs | multilabel].mean().item()

    return measure, compute


def _checked(class_id: int, by_class: np.ndarray, name: str) -> int:
    if not 0 <= class_id < len(by_class):
        raise ValueError(
            f"The metric {name!r} has no class {class_id}: there are {len(by_class)}, from 0."
        )
    return class_id


def _check_options(
    name: str,
    average: str | None,
    multilabel: bool,
    top_k: int | None,
    class_id: object,
    default: str,
) -> None:
    if average not in _AVERAGES:
        raise ValueError(
            f"The average of {name!r} must be 'binary', 'macro', 'micro', 'weighted', "
            f"'samples' or None, got {average!r}."
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"The metric {name!r} has no top_k={top_k}: it must be at least 1.")
    several = multilabel or top_k is not None
    if average == "samples" and not several or average == "binary" and several:
        raise ValueError(
            f"The average {average!r} of {name!r} is for {'one label' if several else ''}"
            f"{'' if several else 'several labels'} per example: use another average, or "
            f"multilabel={not several}."
        )
    if class_id is not None and average != default:
        raise ValueError(
            f"The metric {name!r} with class_id={class_id!r} measures that class alone, without "
            f"average={average!r}: pass one of the two."
        )


def _arranged(measure: Function, name: str, num_classes: int | None, axis: int) -> Function:
    """Measures predicted labels as scores, and scores whose classes are on another axis."""
    if num_classes is None and axis == -1:
        return measure
    if num_classes is not None and num_classes < 1:
        raise ValueError(f"The metric {name!r} has no num_classes={num_classes}: give 1 or more.")

    def measured(outputs: Array, targets: Array, *, weights: Array | None = None) -> Sums:
        outputs, targets = jnp.asarray(outputs), jnp.asarray(targets)
        is_labels = jnp.issubdtype(outputs.dtype, jnp.integer) and outputs.shape == targets.shape
        if num_classes is not None and is_labels:
            is_label = (outputs >= 0) & (outputs < num_classes)
            outputs = jnp.where(is_label[..., None], jax.nn.one_hot(outputs, num_classes), jnp.nan)
        elif axis != -1:
            is_onehot = outputs.shape == targets.shape
            outputs = jnp.moveaxis(outputs, axis, -1)
            targets = jnp.moveaxis(targets, axis, -1) if is_onehot else targets
        if num_classes is not None and outputs.shape[-1] != num_classes:
            raise ValueError(
                f"The metric {name!r} has num_classes={num_classes}, but got outputs of shape "
                f"{outputs.shape}: they need a score for each class on the last axis, or are "
                "integer labels of the shape of the targets."
            )
        return measure(outputs, targets, weights=weights)

    return measured


def by_thresholds(
    make: Callable[[float | None], Metric], threshold: Threshold, configure: Callable[..., Metric]
) -> Metric:
    """Makes the metric for one threshold, or an array-valued metric for several."""
    given: Any = threshold
    if np.ndim(given) == 0:
        return dataclasses.replace(make(given), configure=configure)
    each = [make(one) for one in np.asarray(given).tolist()]

    def measure(*arguments: Array, weights: Array | None = None) -> Sums:
        return {str(i): m.measure(*arguments, weights=weights) for i, m in enumerate(each)}

    def compute(sums: Sums) -> np.ndarray:
        return np.asarray([metric.compute(sums[str(i)]) for i, metric in enumerate(each)])

    return Metric(measure, compute, each[0].name, configure)


precision: Metric = _rate("precision", lambda of: (of.tp, of.tp + of.fp))
"""TP / (TP + FP): the fraction of predicted labels that are correct; 0 if none is predicted."""

recall: Metric = _rate("recall", lambda of: (of.tp, of.tp + of.fn))
"""TP / (TP + FN), sensitivity: the fraction of actual labels predicted; 0 if there are none."""

specificity: Metric = _rate("specificity", lambda of: (of.tn, of.tn + of.fp))
"""TN / (TN + FP): the recall of "no"."""

negative_predictive_value: Metric = _rate(
    "negative_predictive_value", lambda of: (of.tn, of.tn + of.fn)
)
"""TN / (TN + FN): the precision of "no"."""

false_positive_rate: Metric = _rate("false_positive_rate", lambda of: (of.fp, of.tn + of.fp))
"""FP / (FP + TN): 1 - specificity."""

false_negative_rate: Metric = _rate("false_negative_rate", lambda of: (of.fn, of.tp + of.fn))
"""FN / (FN + TP): 1 - recall."""

f1: Metric = _rate("f1", lambda of: (2 * of.tp, 2 * of.tp + of.fp + of.fn))
"""The harmonic mean of precision and recall."""


def _fbeta() -> Metric:
    def configure(*, beta: float = 1.0, **options: Any) -> Metric:
        square = beta * beta

        def fraction(of: Counts) -> tuple[ArrayLike, ArrayLike]:
            return (1 + square) * of.tp, (1 + square) * of.tp + of.fp + square * of.fn

        return dataclasses.replace(_rate("fbeta", fraction)(**options), configure=configure)

    # Its signature: `beta`, and the options of every rate.
    common = inspect.signature(f1.configure or configure).parameters.values()
    beta = inspect.signature(configure).parameters["beta"]
    vars(configure)["__signature__"] = inspect.Signature([beta, *common])
    return configure()


fbeta: Metric = _fbeta()
"""The weighted harmonic mean of precision and recall, in which recall counts `beta` times."""

dice: Metric = _rate("dice", lambda of: (2 * of.tp, 2 * of.tp + of.fp + of.fn))
"""Dice coefficient, 2 TP / (2 TP + FP + FN), per class; equal to F1."""

iou: Metric = _rate("iou", lambda of: (of.tp, of.tp + of.fp + of.fn))
"""Intersection over union (Jaccard index), TP / (TP + FP + FN), per class.

It is computed over all data, as in Keras, not averaged over examples. For a mask with a single
score for each element, `average="binary"` takes outputs and targets of one shape.
"""

mean_iou: Metric = _rate("mean_iou", lambda of: (of.tp, of.tp + of.fp + of.fn), default="macro")
"""The mean of `iou` over the classes that occur or are predicted, also for two classes."""
