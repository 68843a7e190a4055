"""Metrics that count by class: precision, recall, F1, and the confusion matrix with its picture."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from flaxfit._pyplot import pyplot
from flaxfit.metrics._labels import classes_of
from flaxfit.metrics._metric import Metric, ratio, weights_of


def _rate(name: str, shares: Callable[[Any], tuple[Any, Any]]) -> Metric:
    """Makes a metric that is a ratio of counts, by class and then averaged.

    Its options are `average` and `threshold`. `average` is "binary" (class 1 only), "macro" (the
    mean over the classes that occur or are predicted) or "micro" (the ratio of the counts of all
    classes); by default "binary" for two classes and "macro" for more. `threshold` is the logit
    above which class 1 of two is predicted.
    """

    def configure(*, average: str | None = None, threshold: float = 0.0) -> Metric:
        if average not in (None, "binary", "macro", "micro"):
            raise ValueError(
                f"The average of {name!r} must be 'binary', 'macro' or 'micro', got {average!r}."
            )

        def measure(outputs: Any, targets: Any, *, weights: Any = None) -> Any:
            actual, predicted, n_classes = classes_of(outputs, targets, threshold=threshold)
            if average == "binary" and n_classes != 2:
                raise ValueError(
                    f"Cannot take the binary {name!r} of {n_classes} classes: use "
                    f"{name}(average='macro') or {name}(average='micro')."
                )
            weights = weights_of(actual, weights)
            return {
                "actual": _by_class(n_classes, weights, actual),
                "predicted": _by_class(n_classes, weights, predicted),
                "right": _by_class(n_classes, weights * (actual == predicted), actual),
            }

        def compute(sums: Any) -> Any:
            sums = {part: np.asarray(counts) for part, counts in sums.items()}
            if not sums["actual"].any():
                return np.nan
            occurs = (sums["actual"] + sums["predicted"]) > 0
            chosen = average or ("binary" if len(occurs) == 2 else "macro")
            if chosen == "micro":
                return ratio(*shares({part: counts.sum() for part, counts in sums.items()}), 0.0)
            by_class = np.asarray(ratio(*shares(sums), 0.0))
            return by_class[1].item() if chosen == "binary" else by_class[occurs].mean().item()

        return Metric(measure, compute, name, configure)

    return configure()


precision = _rate("precision", lambda sums: (sums["right"], sums["predicted"]))
"""The share of right ones among what was predicted; 0 where nothing was predicted."""

recall = _rate("recall", lambda sums: (sums["right"], sums["actual"]))
"""The share of what there was that was predicted; 0 where there was nothing."""

f1 = _rate("f1", lambda sums: (2 * sums["right"], sums["actual"] + sums["predicted"]))
"""The harmonic mean of precision and recall."""


def confusion_matrix(n_classes: int) -> Metric:
    """Makes the weights of the examples by actual class (rows) and predicted class (columns).

    Its value is an array of shape `(n_classes, n_classes)`.

    >>> matrix = confusion_matrix(2)
    >>> matrix.compute(matrix.measure(np.array([-1.0, 2.0, 3.0]), np.array([0, 0, 1])))
    array([[1., 1.],
           [0., 1.]], dtype=float32)
    """

    def measure(outputs: Any, targets: Any, *, weights: Any = None) -> Any:
        actual, predicted, n_found = classes_of(outputs, targets)
        if n_found != n_classes:
            raise ValueError(
                f"A confusion matrix of {n_classes} classes does not fit outputs of shape "
                f"{np.shape(outputs)}, which tell {n_found} classes apart."
            )
        return _by_class(n_classes, weights_of(actual, weights), actual, predicted)

    return Metric(measure, np.asarray, "confusion_matrix")


def plot_confusion_matrix(matrix: Any, names: Sequence[str] | None = None) -> Any:
    """Draws the weights of the examples by actual class (rows) and predicted class (columns).

    Colours are shares of the row, so that a class with few examples shows as well.

    >>> import matplotlib
    >>> matplotlib.use("agg")
    >>> axes = plot_confusion_matrix([[8, 1], [2, 9]], names=["cat", "dog"])
    >>> axes.get_xlabel(), [label.get_text() for label in axes.get_xticklabels()]
    ('predicted', ['cat', 'dog'])

    Args:
      matrix: the value of `confusion_matrix`, or any other square array of counts.
      names: those of the classes; None: their numbers.

    Returns:
      The matplotlib axes (`axes.figure.savefig(...)`).

    Raises:
      ValueError: it is not square, or there is another number of names.
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


def _by_class(n_classes: int, weights: Any, *classes: Any) -> Any:
    """Adds the weights up by class, or by pairs of classes; leaves out labels out of range."""
    # A negative index would count from the end, so it is sent out of range, too.
    places = tuple(jnp.where(labels < 0, n_classes, labels) for labels in classes)
    return jnp.zeros((n_classes,) * len(places), weights.dtype).at[places].add(weights, mode="drop")
