"""The confusion matrix, from which all metrics of predicted classes follow, and its picture."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from flaxfit.display import pyplot
from flaxfit.metrics._counts import add_by_class
from flaxfit.metrics._labels import class_answers
from flaxfit.metrics._metric import Metric, ratio
from flaxfit.metrics._validity import counted_weights, warn_of
from flaxfit.tree import Array, ArrayLike, Sums


def confusion_matrix(
    n_classes: int | None = None,
    *,
    threshold: float | None = None,
    from_logits: bool = True,
    normalize: str | None = None,
    **options: Any,
) -> Metric:
    """Makes a metric that adds up weights by actual class (rows) and predicted class (columns).

    Its value is an array of shape `(n_classes, n_classes)`. As a name, "confusion_matrix".

    >>> matrix = confusion_matrix(2)
    >>> matrix.compute(matrix.measure(np.array([-1.0, 2.0, 3.0]), np.array([0, 0, 1])))
    array([[1., 1.],
           [0., 1.]], dtype=float32)

    Args:
      n_classes: the number of classes of the outputs; None: as many as they have.
      threshold: the logit above which class 1 of two is predicted.
      from_logits: whether the outputs are logits; if not, the threshold is 0.5 unless given.
      normalize: "true" divides by the sum of each row, "pred" by the sum of each column, "all" by
        the total.
      options: `name` and `ignore_label`, as of every metric.
    """
    if normalize not in (None, "true", "pred", "all"):
        raise ValueError(f"normalize must be 'true', 'pred', 'all' or None, got {normalize!r}.")

    def measure(outputs: Array, targets: Array, *, weights: Array | None = None) -> Sums:
        found = class_answers(outputs, targets, threshold=threshold, from_logits=from_logits)
        if n_classes not in (None, found.n_classes):
            raise ValueError(
                f"A confusion matrix of {n_classes} classes does not fit outputs of shape "
                f"{np.shape(outputs)}, which have {found.n_classes} classes."
            )
        counted, doubts = counted_weights(found, weights, from_logits=from_logits)
        matrix = add_by_class(found.n_classes, counted, found.actual, found.predicted)
        return {"matrix": matrix, "doubts": doubts}

    def compute(sums: Sums) -> np.ndarray:
        warn_of(sums["doubts"], "confusion_matrix")
        matrix = np.asarray(sums["matrix"])
        if np.isnan(matrix).any():
            return np.full_like(matrix, np.nan)
        if normalize is None:
            return matrix
        axis = {"true": 1, "pred": 0, "all": None}[normalize]
        return np.asarray(ratio(matrix, matrix.sum(axis, keepdims=True), 0.0))

    return Metric(measure, compute, "confusion_matrix")(**options)


def plot_confusion_matrix(matrix: ArrayLike, names: Sequence[str] | None = None) -> Any:
    """Draws the weights of the examples by actual class (rows) and predicted class (columns).

    Colors show fractions of the row, so that classes with few examples are visible.

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
