"""Which class an example belongs to, and which one the outputs name: told by the static shapes."""

from typing import Any

import jax.numpy as jnp


def classes_of(outputs: Any, targets: Any, *, threshold: float = 0.0) -> tuple[Any, Any, int]:
    """The actual and the predicted classes as integers of one shape, and how many there are.

    Scores of shape `(batch, ..., classes)` go with integer labels `(batch, ...)` or one-hot labels
    of the same shape; the largest score wins. A single score, `(batch,)` or `(batch, 1)`, is the
    logit of class 1; it wins above the threshold.
    """
    outputs, targets = jnp.asarray(outputs), jnp.asarray(targets)
    if is_single_score(outputs, targets):
        scores = outputs.reshape(targets.shape)
        return (targets > 0.5).astype(int), (scores > threshold).astype(int), 2
    actual = labels_of(outputs, targets)
    if outputs.shape[-1] == 2:
        return actual, (outputs[..., 1] - outputs[..., 0] > threshold).astype(int), 2
    return actual, outputs.argmax(-1), outputs.shape[-1]


def binary_scores_of(outputs: Any, targets: Any, *, name: str) -> tuple[Any, Any]:
    """One score per label and whether the label is 1, from a single score or from two classes."""
    outputs, targets = jnp.asarray(outputs), jnp.asarray(targets)
    if is_single_score(outputs, targets):
        return outputs.reshape(targets.shape), targets > 0.5
    if outputs.shape[-1] == 2:
        return outputs[..., 1] - outputs[..., 0], labels_of(outputs, targets) == 1
    raise ValueError(
        f"The metric {name!r} wants a single score per label, (batch,) or (batch, 1), or the "
        f"scores of two classes; got outputs {outputs.shape} and labels {targets.shape}."
    )


def is_single_score(outputs: Any, targets: Any) -> bool:
    """Whether the outputs are one logit per label rather than one score per class."""
    is_single = outputs.ndim == 1 or outputs.shape[-1] == 1
    return is_single and _without_last_one(outputs.shape) == _without_last_one(targets.shape)


def labels_of(outputs: Any, targets: Any) -> Any:
    """Integer labels, from themselves or from one-hot labels.

    Raises:
      ValueError: the targets fit the outputs in neither way.
    """
    if outputs.ndim > 1 and targets.shape == outputs.shape:
        return targets.argmax(-1)
    if targets.shape == outputs.shape[:-1] and jnp.issubdtype(targets.dtype, jnp.integer):
        return targets
    wanted = f"labels of shape {outputs.shape}"
    if outputs.ndim > 1:
        wanted = f"integer labels of shape {outputs.shape[:-1]} or one-hot {wanted}"
    raise ValueError(
        f"A classification metric wants {wanted} for outputs of shape {outputs.shape}, "
        f"got labels {targets.shape} {targets.dtype}."
    )


def _without_last_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[:-1] if len(shape) > 1 and shape[-1] == 1 else shape
