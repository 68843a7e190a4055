"""How often the outputs name the right class: accuracy and its relatives."""

from typing import Any

import jax
import jax.numpy as jnp

from flaxfit.metrics._metric import Metric, mean


def hits(outputs: Any, targets: Any) -> Any:
    """Whether each prediction is right; what the targets are is told by the shapes.

    Scores of shape `(batch, ..., classes)` go with integer labels `(batch, ...)` or one-hot labels
    of the same shape. A single score `(batch,)` or `(batch, 1)` is a logit of the label 1.
    """
    outputs, targets = jnp.asarray(outputs), jnp.asarray(targets)
    if is_single_score(outputs, targets):
        scores, targets = outputs.reshape(targets.shape), targets > 0.5
        return (scores > 0) == targets
    return outputs.argmax(-1) == labels_of(outputs, targets)


def is_single_score(outputs: Any, targets: Any) -> bool:
    """Whether the outputs are one logit per label rather than one score per class."""
    scores = outputs.shape[:-1] if outputs.shape[-1:] == (1,) else outputs.shape
    labels = targets.shape[:-1] if targets.shape[-1:] == (1,) else targets.shape
    return scores == labels and (outputs.ndim == 1 or outputs.shape[-1] == 1)


def labels_of(outputs: Any, targets: Any) -> Any:
    """Integer labels, from themselves or from one-hot labels.

    Raises:
      ValueError: the targets fit the outputs in neither way.
    """
    if outputs.ndim > 1 and targets.shape == outputs.shape:
        return targets.argmax(-1)
    if targets.shape == outputs.shape[:-1] and jnp.issubdtype(targets.dtype, jnp.integer):
        return targets
    wanted = f"integer labels of shape {outputs.shape[:-1]} or one-hot labels of shape "
    raise ValueError(
        f"A classification metric wants {wanted if outputs.ndim > 1 else 'labels of shape '}"
        f"{outputs.shape} for outputs of shape {outputs.shape}, "
        f"got labels {targets.shape} {targets.dtype}."
    )


accuracy = mean(hits, name="accuracy")
"""The share of right predictions: integer, one-hot or binary labels, told apart by shape."""


def _binary_hits(outputs: Any, targets: Any) -> Any:
    if jnp.shape(outputs) != jnp.shape(targets):
        raise ValueError(
            f"The metric 'binary_accuracy' wants labels of shape {jnp.shape(outputs)}, as the "
            f"outputs, got labels {jnp.shape(targets)}."
        )
    return (jnp.asarray(outputs) > 0) == (jnp.asarray(targets) > 0.5)


binary_accuracy = mean(_binary_hits, name="binary_accuracy")
"""The share of right yes-or-no answers over all elements: several logits per example."""


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
