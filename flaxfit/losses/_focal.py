"""Cross-entropies that give easy or noisy examples less weight."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxfit.losses._crossentropy import (
    at_label,
    check_labels,
    not_a_class,
    of_probabilities,
    smoothed,
)
from flaxfit.losses._shared import (
    but_ruled_out,
    certain_bits,
    check_onehot,
    check_same_shape,
    check_share,
    floating,
    log_of_shares,
    power,
    public,
    smoothed_bits,
    with_axis_last,
)
from flaxfit.tree import ArrayLike, by_row


@public
@by_row
def binary_focal_crossentropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    alpha: float = 0.25,
    gamma: float = 2.0,
    apply_class_balancing: bool = False,
    from_logits: bool = True,
    label_smoothing: float = 0.0,
) -> jax.Array:
    """Computes the binary focal loss, `-(1 - p)**gamma log(p)`, p the true class's probability.

    T.-Y. Lin et al., "Focal Loss for Dense Object Detection", 2017.

    Args:
      logits: outputs of any shape.
      labels: in 0..1, of the same shape.
      alpha: the weight of class 1, with `apply_class_balancing`; class 0 has 1 - alpha.
      gamma: the exponent; 0 makes it the cross-entropy.
      apply_class_balancing: whether to weight the classes.
      from_logits, label_smoothing: as in `binary_crossentropy`.

    Raises:
      ValueError: the shapes differ, or `alpha` or `label_smoothing` is outside 0..1.

    >>> values = binary_focal_crossentropy(np.array([0.0, 1.0]), np.array([0, 1]))
    >>> np.asarray(values, float).round(4)
    array([0.1733, 0.0227])
    """
    name = "binary_focal_crossentropy"
    check_same_shape(name, logits, labels, "labels")
    check_share(name, "label_smoothing", label_smoothing)
    check_share(name, "alpha", alpha)
    logits, labels = floating(logits), floating(labels)
    labels = smoothed_bits(labels, label_smoothing) if label_smoothing else labels
    balance = alpha if apply_class_balancing else None
    if from_logits:
        logits = certain_bits(logits, labels)
        return optax.sigmoid_focal_loss(logits, labels, alpha=balance, gamma=gamma)
    of_label = labels * logits + (1 - labels) * (1 - logits)
    values = power(1 - of_label, gamma) * of_probabilities(logits, labels)
    return values if balance is None else values * (labels * alpha + (1 - labels) * (1 - alpha))


@public
@by_row
def categorical_focal_crossentropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    alpha: float | Sequence[float] = 0.25,
    gamma: float = 2.0,
    from_logits: bool = True,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> jax.Array:
    """Computes the focal loss of one-hot labels, `-sum(labels alpha (1 - p)**gamma log(p))`.

    T.-Y. Lin et al., "Focal Loss for Dense Object Detection", 2017.

    Args:
      logits: `(batch, ..., classes)`.
      labels: in 0..1, of the same shape.
      alpha: the weight of all classes, or one for each.
      gamma: the exponent.
      from_logits, label_smoothing, axis: as in `onehot_crossentropy`.

    Raises:
      ValueError: the labels are not of the shape of the logits, or `label_smoothing` is outside
        0..1.

    >>> categorical_focal_crossentropy(np.zeros((1, 2)), np.eye(2)[:1]).round(4)
    Array([0.0433], dtype=float32)
    """
    name = "categorical_focal_crossentropy"
    logits, labels = with_axis_last(name, axis, logits, labels)
    check_onehot(name, logits, labels, "crossentropy")
    logits, labels = floating(logits), smoothed(name, labels, label_smoothing)
    logs = jax.nn.log_softmax(logits) if from_logits else log_of_shares(logits)
    factors = jnp.asarray(alpha, logs.dtype) * power(-jnp.expm1(logs), gamma)
    return -(labels * factors * but_ruled_out(logs, labels)).sum(-1)


@public
@by_row
def generalized_crossentropy(
    logits: ArrayLike, labels: ArrayLike, *, q: float = 0.5, from_logits: bool = True
) -> jax.Array:
    """Computes `(1 - p**q) / q`, with p the label's probability; it tolerates label noise.

    It lies between the cross-entropy (q near 0) and the absolute error (q near 1). Z. Zhang,
    M. Sabuncu, "Generalized Cross Entropy Loss for Training Deep Neural Networks with Noisy
    Labels", 2018.

    Args:
      logits: `(batch, ..., classes)`.
      labels: integers of shape `(batch, ...)`.
      q: between 0 and 1.
      from_logits: False for outputs that are probabilities.

    Raises:
      ValueError: `q` is not in (0, 1), or the labels are not integers of shape `(batch, ...)`.

    >>> generalized_crossentropy(np.zeros((1, 4)), np.array([2]))
    Array([1.], dtype=float32)
    """
    if not 0 < q < 1:
        raise ValueError(f"loss 'generalized_crossentropy': q must lie in (0, 1), got {q!r}.")
    check_labels("generalized_crossentropy", logits, labels)
    logits, labels = floating(logits), jnp.asarray(labels)
    if from_logits:
        values = -jnp.expm1(q * at_label(jax.nn.log_softmax(logits), labels)) / q
    else:
        values = (1 - power(at_label(logits, labels), q)) / q
    return jnp.where(not_a_class(labels, np.shape(logits)[-1]), jnp.nan, values)
