"""Metrics that count by class: precision, recall, F1, and the confusion matrix with its picture."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.display._pyplot import pyplot
from flaxfit.metrics._labels import Answers, binary_answers, class_answers
from flaxfit.metrics._metric import Metric, ratio
from flaxfit.metrics._validity import counted_weights, warn_of
from flaxfit.tree._types import Array, ArrayLike, Sums

Counts = Mapping[str, ArrayLike]
"""The weights by class: how many there are, were predicted, and both ("right")."""

_AVERAGES = ("auto", "binary", "macro", "micro", "weighted", "samples", None)


def _rate(name: str, fraction: Callable[[Counts], tuple[ArrayLike, ArrayLike]]) -> Metric:
    """Makes a metric that is a ratio of counts, by class and then averaged.

    The options, which mean what they mean in scikit-learn:
      average: "binary" (class 1 only), "macro" (the mean over the classes that occur or are
        predicted), "weighted" (their mean weighted by how often they occur), "micro" (the ratio of
        the counts of all classes), "samples" (the mean over the examples, with `multilabel`), or
        None (an array, by class). By default "binary" for two classes and "macro" for more.
      threshold: the logit above which class 1 of two is predicted, or one of several labels.
      from_logits: whether the outputs are logits; if not, the threshold is 0.5 unless given.
      multilabel: whether an example may have several labels, or none: outputs and labels have the
        shape `(batch, ..., classes)`, and each class is predicted by its own output.
    """

    def configure(
        *,
        average: str | None = "auto",
        threshold: float | None = None,
        from_logits: bool = True,
        multilabel: bool = False,
    ) -> Metric:
        if average not in _AVERAGES:
            raise ValueError(
                f"The average of {name!r} must be 'binary', 'macro', 'micro', 'weighted', "
                f"'samples' or None, got {average!r}."
            )
        if average == "samples" and not multilabel or average == "binary" and multilabel:
            raise ValueError(
                f"The average {average!r} of {name!r} is for {'one label' if multilabel else ''}"
                f"{'' if multilabel else 'several labels'} per example: use another average, or "
                f"multilabel={not multilabel}."
            )
        options = {"threshold": threshold, "from_logits": from_logits}

        def measure(outputs: Array, targets: Array, *, weights: Array | None = None) -> Sums:
            if multilabel:
                found = binary_answers(outputs, targets, name=name, **options)
            else:
                found = class_answers(outputs, targets, **options)
            if average == "binary" and found.n_classes != 2:
                raise ValueError(
                    f"Cannot take the binary {name!r} of {found.n_classes} classes: use "
                    f"{name}(average='macro') or {name}(average='micro')."
                )
            counted, doubts = counted_weights(found, weights, from_logits=from_logits)
            if average == "samples":
                marks = {part: each.sum(-1) for part, each in _marks(found).items()}
                right, n = fraction(marks)
                by_example = jnp.where(n > 0, right / jnp.maximum(n, 1), 0)
                sums = {"sum": (counted.sum(-1) * by_example).sum()}
            else:
                sums = _count_marks(found, counted) if multilabel else _count(found, counted)
            return {**sums, "weight": counted.sum(), "doubts": doubts}

        def compute(sums: Sums) -> ArrayLike:
            warn_of(sums["doubts"], name)
            counts = {
                part: np.asarray(each, np.float64)
                for part, each in sums.items()
                if part != "doubts"
            }
            if average == "samples":
                return ratio(counts["sum"], counts["weight"])
            by_class = np.asarray(ratio(*fraction(counts), 0.0))
            if not counts["weight"] > 0:  # Nothing, or NaN.
                return np.full_like(by_class, np.nan) if average is None else np.nan
            if average is None:
                return by_class
            if average == "micro":
                return ratio(*fraction({part: each.sum() for part, each in counts.items()}), 0.0)
            if average == "weighted":
                return ratio((by_class * counts["actual"]).sum(), counts["actual"].sum(), 0.0)
            is_binary = len(by_class) == 2 and not multilabel
            if average == "binary" or average == "auto" and is_binary:
                return by_class[1].item()
            occurs = (counts["actual"] + counts["predicted"] > 0) | multilabel
            return by_class[occurs].mean().item()

        return Metric(measure, compute, name, configure)

    return configure()


precision = _rate("precision", lambda sums: (sums["right"], sums["predicted"]))
"""The share of the predicted labels that are correct; 0 if none is predicted."""

recall = _rate("recall", lambda sums: (sums["right"], sums["actual"]))
"""The share of the actual labels that are predicted; 0 if there are none."""

f1 = _rate("f1", lambda sums: (2 * sums["right"], sums["actual"] + sums["predicted"]))
"""The harmonic mean of precision and recall."""


def confusion_matrix(
    n_classes: int, *, threshold: float | None = None, from_logits: bool = True
) -> Metric:
    """Makes a metric that adds up weights by actual class (rows) and predicted class (columns).

    Its value is an array of shape `(n_classes, n_classes)`.

    >>> matrix = confusion_matrix(2)
    >>> matrix.compute(matrix.measure(np.array([-1.0, 2.0, 3.0]), np.array([0, 0, 1])))
    array([[1., 1.],
           [0., 1.]], dtype=float32)

    Args:
      n_classes: the number of classes of the outputs.
      threshold: the logit above which class 1 of two is predicted.
      from_logits: whether the outputs are logits; if not, the threshold is 0.5 unless given.
    """

    def measure(outputs: Array, targets: Array, *, weights: Array | None = None) -> Sums:
        found = class_answers(outputs, targets, threshold=threshold, from_logits=from_logits)
        if found.n_classes != n_classes:
            raise ValueError(
                f"A confusion matrix of {n_classes} classes does not fit outputs of shape "
                f"{np.shape(outputs)}, which tell {found.n_classes} classes apart."
            )
        counted, doubts = counted_weights(found, weights, from_logits=from_logits)
        matrix = _by_class(n_classes, counted, found.actual, found.predicted)
        return {"matrix": matrix, "doubts": doubts}

    def compute(sums: Sums) -> np.ndarray:
        warn_of(sums["doubts"], "confusion_matrix")
        matrix = np.asarray(sums["matrix"])
        return np.full_like(matrix, np.nan) if np.isnan(matrix).any() else matrix

    return Metric(measure, compute, "confusion_matrix")


def plot_confusion_matrix(matrix: ArrayLike, names: Sequence[str] | None = None) -> Any:
    """Draws the weights of the examples by actual class (rows) and predicted class (columns).

    Colours show shares of the row, so that classes with few examples are visible.

    >>> import matplotlib
    >>> matplotlib.use("agg")
    >>> axes = plot_confusion_matrix([[8, 1], [2, 9]], names=["cat", "dog"])
    >>> axes.get_xlabel(), [label.get_text() for label in axes.get_xticklabels()]
    ('predicted', ['cat', 'dog'])

    Args:
      matrix: the value of `confusion_matrix`, or any other square array of counts.
      names: the names of the classes; None: their numbers.

    Returns:
      The matplotlib axes (`axes.figure.savefig(...)`).

    Raises:
      ValueError: the matrix is not square, or there are fewer or more names than classes.
    """
    matrix = np.asarray(matrix)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(
            "A confusion matrix has as many rows as columns, got an array of shape "
            f"{matrix.shape}: plot what confusion_matrix(n_classes) measured."
        )
    n = len(matrix)
    names = [str(i) for i in range(n)] if names is None else list(names)
    if len(names) != n:
        raise ValueError(f"There are {n} classes, but {len(names)} names: {', '.join(names)}.")
    side = max(3.0, 1.5 + 0.45 * n)
    _, axes = pyplot().subplots(figsize=(side, side), layout="constrained")
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), np.finfo(np.float32).tiny)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row, column in np.ndindex(n, n):
        colour = "white" if shares[row, column] > 0.5 else "black"
        text = f"{matrix[row, column]:.4g}"
        axes.text(column, row, text, ha="center", va="center", color=colour)
    axes.set_xticks(range(n), names, rotation=90 if max(map(len, names), default=0) > 3 else 0)
    axes.set_yticks(range(n), names)
    axes.set(xlabel="predicted", ylabel="actual")
    return axes


def _count(answers: Answers, weights: jax.Array) -> Counts:
    """The counts by class of examples that have one label each."""
    n, actual, predicted = answers.n_classes, answers.actual, answers.predicted
    return {
        "actual": _by_class(n, weights, actual),
        "predicted": _by_class(n, weights, predicted),
        "right": _by_class(n, weights * (actual == predicted), actual),
    }


def _count_marks(answers: Answers, weights: jax.Array) -> Counts:
    """The counts by class of examples that have several labels."""
    axes = tuple(range(answers.actual.ndim - 1))
    return {part: (weights * each).sum(axes) for part, each in _marks(answers).items()}


def _marks(answers: Answers) -> dict[str, jax.Array]:
    actual, predicted = answers.actual, answers.predicted
    return {"actual": actual, "predicted": predicted, "right": actual & predicted}


def _by_class(n_classes: int, weights: jax.Array, *classes: jax.Array) -> jax.Array:
    """Adds the weights up by class, or by pairs of classes."""
    return jnp.zeros((n_classes,) * len(classes), weights.dtype).at[classes].add(weights)
