"""How often the outputs name the right class: accuracy and its relatives."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from flaxfit.metrics._labels import classes_of, labels_of
from flaxfit.metrics._metric import Metric, mean


def _accuracy(*, threshold: float = 0.0) -> Metric:
    """Makes the share of right predictions; see `accuracy`."""

    def is_right(outputs: Any, targets: Any) -> Any:
        actual, predicted, _ = classes_of(outputs, targets, threshold=threshold)
        return actual == predicted

    return dataclasses.replace(mean(is_right, name="accuracy"), configure=_accuracy)


accuracy = _accuracy()
"""The share of right predictions: integer, one-hot or binary labels, told apart by shape.

Its option `threshold` is the logit above which class 1 of two is predicted.
"""


def _binary_accuracy(*, threshold: float = 0.0) -> Metric:
    """Makes the share of right answers; see `binary_accuracy`."""

    def is_right(outputs: Any, targets: Any) -> Any:
        outputs, targets = jnp.asarray(outputs), jnp.asarray(targets)
        if outputs.shape != targets.shape:
            raise ValueError(
                "The metric 'binary_accuracy' wants labels of the shape of the outputs, got "
                f"outputs {outputs.shape} and labels {targets.shape}."
            )
        return (outputs > threshold) == (targets > 0.5)

    return dataclasses.replace(mean(is_right, name="binary_accuracy"), configure=_binary_accuracy)


binary_accuracy = _binary_accuracy()
"""The share of right answers among many yes-or-no questions per example.

Its option `threshold` is the logit above which the answer is yes.
"""


def top_k(k: int) -> Metric:
    """Makes the share of examples whose class is among the `k` highest scores.

    >>> import numpy as np
    >>> outputs, labels = np.array([[0.1, 0.7, 0.2], [0.3, 0.5, 0.2]]), np.array([2, 2])
    >>> top_k(2).compute(top_k(2).measure(outputs, labels))
    0.5

    Raises:
      ValueError: `k` is less than 1, or (when measuring) more than the number of classes.
    """
    if k < 1:
        raise ValueError(f"Cannot look at the top {k} classes: k must be at least 1.")

    def is_among_top_k(outputs: Any, targets: Any) -> Any:
        outputs, targets = jnp.asarray(outputs), jnp.asarray(targets)
        labels = labels_of(outputs, targets)
        if k > outputs.shape[-1]:
            raise ValueError(
                f"Cannot look at the top {k} of {outputs.shape[-1]} classes: use a smaller k."
            )
        _, classes = jax.lax.top_k(outputs, k)
        return (classes == labels[..., None]).any(-1)

    return mean(is_among_top_k, name=f"top_{k}")
