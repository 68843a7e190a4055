"""Actual and predicted classes, found by the static shapes of outputs and labels."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flaxfit.losses._crossentropy import not_a_class
from flaxfit.losses._shared import floating
from flaxfit.tree import Array, ArrayLike

_SEVERAL = (
    "Of more classes, say multi_class='ovr', each against the others; of several labels per "
    "example, multilabel=True."
)
BY_CLASS = dict.fromkeys(["auc", "average_precision", "pr_auc"], _SEVERAL)
"""The counterparts for several classes of metrics of a single score."""


class Answers(NamedTuple):
    """Actual and predicted classes, as integers or as a boolean for each class."""

    actual: jax.Array
    predicted: jax.Array
    n_classes: int
    is_label: jax.Array
    """Whether each label is valid; an invalid label must not count as a class."""
    outputs: jax.Array
    """The outputs that the predictions come from: one per answer, or one per class."""
    is_probable: jax.Array | None = None
    """Whether the outputs may be probabilities, where they are taken for logits by default."""


def class_answers(
    outputs: Array, targets: Array, *, threshold: float | None = None, from_logits: bool = True
) -> Answers:
    """Returns the actual and the predicted classes as integers of one shape.

    Scores of shape `(batch, ..., classes)` go with integer labels `(batch, ...)` or one-hot labels
    of the same shape; the largest score wins, the first of equal ones. A single score, `(batch,)`
    or `(batch, 1)`, is the logit or the probability of class 1; it wins above the threshold.
    """
    outputs, targets = floating(outputs), jnp.asarray(targets)
    limit = _limit(threshold, from_logits)
    if _is_single_score(outputs, targets):
        scores = outputs.reshape(targets.shape)
        actual, predicted = (targets > 0.5).astype(int), (scores > limit).astype(int)
        is_probable = _is_probable(scores, threshold, from_logits)
        return Answers(actual, predicted, 2, is_share(targets), scores, is_probable)
    actual, is_label = labels_of(outputs, targets)
    n_classes = outputs.shape[-1]
    predicted = outputs.argmax(-1)
    if n_classes == 2:
        score = _difference(outputs) if from_logits else outputs[..., 1]
        predicted = (score > limit).astype(int)
    return Answers(actual, predicted, n_classes, is_label, outputs)


def binary_answers(
    outputs: Array,
    targets: Array,
    *,
    name: str,
    threshold: float | None = None,
    from_logits: bool = True,
) -> Answers:
    """Returns for each class or question whether the label and the prediction are yes."""
    outputs, targets = floating(outputs), jnp.asarray(targets)
    if outputs.shape != targets.shape:
        raise ValueError(
            f"The metric {name!r} expects labels of the shape of the outputs, got outputs "
            f"{outputs.shape} and labels {targets.shape}."
        )
    predicted = outputs > _limit(threshold, from_logits)
    n_classes = outputs.shape[-1] if outputs.ndim else 1
    is_probable = _is_probable(outputs, threshold, from_logits)
    return Answers(targets > 0.5, predicted, n_classes, is_share(targets), outputs, is_probable)


def one_class_answers(
    outputs: Array, targets: Array, *, threshold: float | None = None, from_logits: bool = True
) -> Answers:
    """Returns for each class whether it is actual, and whether its score exceeds the threshold."""
    outputs = floating(outputs)
    labels, is_label = labels_of(outputs, jnp.asarray(targets))
    scores = one_class_scores(outputs) if from_logits else outputs
    predicted = scores > _limit(threshold, from_logits)
    actual = jax.nn.one_hot(labels, outputs.shape[-1], dtype=bool)
    return Answers(actual, predicted, outputs.shape[-1], is_label, outputs)


def top_k_answers(
    outputs: Array,
    targets: Array,
    k: int,
    *,
    threshold: float | None = None,
    from_logits: bool = True,
) -> Answers:
    """Returns for each class whether it is actual, and whether it is in the top `k`.

    With a threshold, its output must also exceed that. Targets are integer labels, or mark one or
    several classes in the shape of the outputs.
    """
    outputs, targets = floating(outputs), jnp.asarray(targets)
    n_classes = outputs.shape[-1]
    if k > n_classes:
        raise ValueError(f"Cannot take the top {k} of {n_classes} classes: use a smaller k.")
    if outputs.shape == targets.shape:
        actual, is_label = targets > 0.5, is_share(targets).all(-1)
    else:
        labels, is_label = labels_of(outputs, targets)
        actual = jax.nn.one_hot(labels, n_classes, dtype=bool)
    highest = jax.lax.top_k(outputs, k)[1]
    predicted = jax.nn.one_hot(highest, n_classes, dtype=bool).any(-2)
    if threshold is not None:
        predicted &= outputs > threshold
    return Answers(actual, predicted, n_classes, is_label, outputs)


def one_class_scores(logits: jax.Array) -> jax.Array:
    """Returns the one-vs-rest logit of each class, `log(p / (1 - p))`, p the softmax."""
    log = jax.nn.log_softmax(logits)
    is_highest = jax.nn.one_hot(logits.argmax(-1), logits.shape[-1], dtype=bool)
    others = jax.nn.logsumexp(jnp.where(is_highest, -jnp.inf, logits), -1, keepdims=True)
    # For the highest, 1 - p may be too small to distinguish from 0.
    return jnp.where(is_highest, logits - others, log - jnp.log1p(-jnp.exp(log)))


def binary_scores(outputs: Array, targets: Array, *, name: str) -> Answers:
    """Returns labels with one score each, from single scores or the scores of two classes."""
    outputs, targets = floating(outputs), jnp.asarray(targets)
    is_single = _is_single_score(outputs, targets)
    if not is_single and outputs.shape[-1] != 2:
        raise ValueError(
            f"The metric {name!r} expects a single score per label, (batch,) or (batch, 1), or the "
            f"scores of two classes; got outputs {outputs.shape} and labels {targets.shape}. "
            f"{BY_CLASS.get(name, '')}"
        )
    answers = class_answers(outputs, targets)
    scores = answers.outputs if is_single else _difference(outputs)
    return answers._replace(outputs=scores, is_probable=None)


def labels_of(outputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns integer labels, from integer or one-hot targets, and whether each is valid."""
    n_classes = outputs.shape[-1]
    if outputs.ndim > 1 and targets.shape == outputs.shape:
        shares = floating(targets)
        # Rows that mark several classes, or none, do not sum to 1.
        is_label = (shares >= 0).all(-1) & (jnp.abs(shares.sum(-1) - 1) < 0.02)
        return shares.argmax(-1), is_label
    if targets.shape == outputs.shape[:-1] and jnp.issubdtype(targets.dtype, jnp.integer):
        labels = targets.astype(int)  # The number of classes may not fit a narrower type.
        # The same test as that of the losses: XLA computes it once.
        return jnp.clip(labels, 0, n_classes - 1), jnp.logical_not(not_a_class(targets, n_classes))
    wanted = f"labels of shape {outputs.shape}"
    if outputs.ndim > 1:
        wanted = f"integer labels of shape {outputs.shape[:-1]} or one-hot {wanted}"
    raise ValueError(
        f"A classification metric expects {wanted} for outputs of shape {outputs.shape}, "
        f"got labels {targets.shape} {targets.dtype}."
    )


def is_share(values: ArrayLike) -> jax.Array:
    """Returns whether each value lies in [0, 1], like labels and probabilities."""
    values = floating(values)
    return (values >= 0) & (values <= 1)


def _is_single_score(outputs: jax.Array, targets: jax.Array) -> bool:
    """Returns whether the outputs are one score per label rather than one per class."""
    is_single = outputs.ndim == 1 or outputs.shape[-1] == 1
    return is_single and _without_last_one(outputs.shape) == _without_last_one(targets.shape)


def _limit(threshold: float | None, from_logits: bool) -> float:
    """Returns the threshold, by default that of a probability of 0.5."""
    if threshold is None:
        return 0.0 if from_logits else 0.5
    return threshold


def _is_probable(
    outputs: jax.Array, threshold: float | None, from_logits: bool
) -> jax.Array | None:
    return is_share(outputs) if threshold is None and from_logits else None


def _difference(scores: jax.Array) -> jax.Array:
    """Returns the score of class 1 minus the score of class 0."""
    low, high = scores[..., 0], scores[..., 1]
    return jnp.where(low == high, 0, high - low)  # inf - inf would be NaN.


def _without_last_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[:-1] if len(shape) > 1 and shape[-1] == 1 else shape
