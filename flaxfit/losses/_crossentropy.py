"""Cross-entropies of distributions over classes, and their divergence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxfit.losses._shared import (
    EPSILON,
    but_ruled_out,
    certain_bits,
    check_onehot,
    check_same_shape,
    check_share,
    clipped,
    floating,
    log_of_shares,
    public,
    smoothed_bits,
    with_axis_last,
)
from flaxfit.tree import Array, ArrayLike, LossFn, by_row


@public
@by_row
def crossentropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    ignore_label: int | None = None,
    label_smoothing: float = 0.0,
    from_logits: bool = True,
    axis: int = -1,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes the cross-entropy of integer labels, `-log(softmax(logits)[label])`.

    Args:
      logits: `(batch, ..., classes)`.
      labels: integers of shape `(batch, ...)`. A label outside `0..classes - 1` gives NaN.
      ignore_label: a label that does not count, such as -100. The loss is then `(values, weights)`,
        with the weight 0 there. `crossentropy(ignore_label=-100)` returns a loss with the option.
      label_smoothing: the fraction of each label that is spread evenly over all classes.
      from_logits: False for outputs that are probabilities. As in Keras they are divided by their
        sum, and below 1e-7 they count as 1e-7.
      axis: the axis of the classes.

    Raises:
      ValueError: the labels are not integers of shape `(batch, ...)`, or an option is out of range.

    >>> crossentropy(np.zeros((3, 4)), np.array([0, 1, 3])).shape
    (3,)
    >>> crossentropy(ignore_label=-100)(np.zeros((2, 4)), np.array([0, -100]))[1]
    Array([1., 0.], dtype=float32)
    """
    (logits,) = with_axis_last("crossentropy", axis, logits)
    check_share("crossentropy", "label_smoothing", label_smoothing)
    check_labels("crossentropy", logits, labels)
    of_label = functools.partial(
        _of_label, label_smoothing=label_smoothing, from_logits=from_logits
    )
    return _values(of_label, floating(logits), jnp.asarray(labels), ignore_label)


def _of_label(
    logits: jax.Array, labels: jax.Array, *, label_smoothing: float, from_logits: bool
) -> jax.Array:
    n_classes = logits.shape[-1]
    # Unlike optax.softmax_cross_entropy_with_integer_labels, this does not count negative labels
    # from the end, and selects the label's logit instead of gathering it: the gradient of a gather
    # is a scatter, which is slow for small models. Subtracting the largest logit first keeps the
    # digits of the loss where logits are large.
    if from_logits:
        largest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        logits = logits - jnp.where(jnp.isfinite(largest), largest, 0)
    else:
        logits = log_of_shares(logits)
    score = at_label(logits, labels)
    if label_smoothing:
        score = (1 - label_smoothing) * score + label_smoothing * logits.mean(-1)
    values = jnp.log(jnp.exp(logits).sum(-1)) - score if from_logits else -score
    return jnp.where(not_a_class(labels, n_classes), jnp.nan, values)


def at_label(values: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns `values[..., label]` for each label."""
    is_labeled = jnp.arange(values.shape[-1]) == labels[..., None].astype(jnp.int32)
    return jnp.where(is_labeled, values, 0).sum(-1)


def _values(
    loss: LossFn, logits: jax.Array, labels: jax.Array, ignore_label: float | None
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns values of a loss; with `ignore_label` also weights, 0 at the ignored labels."""
    if ignore_label is None:
        return jnp.asarray(loss(logits, labels))
    counts = labels != ignore_label
    values = jnp.asarray(loss(logits, jnp.where(counts, labels, 0)))
    return jnp.where(counts, values, 0), counts.astype(jnp.float32)


def not_a_class(labels: Array, n_classes: int) -> Array:
    """Returns a mask of the integer labels outside `0..n_classes - 1`."""
    if labels.dtype.itemsize < 4:  # `n_classes` may not fit into 8 or 16 bits.
        labels = labels.astype(np.int32)
    return (labels < 0) | (labels >= n_classes)


@public
@by_row
def onehot_crossentropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    label_smoothing: float = 0.0,
    from_logits: bool = True,
    axis: int = -1,
) -> jax.Array:
    """Computes the cross-entropy of one-hot or soft labels, `-sum(labels log(softmax(logits)))`.

    Args:
      logits: `(batch, ..., classes)`.
      labels: in 0..1, of the same shape.
      label_smoothing, from_logits, axis: as in `crossentropy`.

    Raises:
      ValueError: the labels are not of the shape of the logits, or an option is out of range.

    >>> onehot_crossentropy(np.zeros((3, 4)), np.eye(4)[:3]).shape
    (3,)
    """
    logits, labels = with_axis_last("onehot_crossentropy", axis, logits, labels)
    check_onehot("onehot_crossentropy", logits, labels, "crossentropy")
    logits, labels = floating(logits), smoothed("onehot_crossentropy", labels, label_smoothing)
    logs = jax.nn.log_softmax(logits) if from_logits else log_of_shares(logits)
    return -(labels * but_ruled_out(logs, labels)).sum(-1)


def smoothed(name: str, labels: ArrayLike, label_smoothing: float) -> jax.Array:
    """Spreads a fraction of one-hot labels evenly over all classes."""
    check_share(name, "label_smoothing", label_smoothing)
    labels = floating(labels)
    return optax.smooth_labels(labels, label_smoothing) if label_smoothing else labels


@public
@by_row
def binary_crossentropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    ignore_label: float | None = None,
    label_smoothing: float = 0.0,
    from_logits: bool = True,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes the elementwise binary cross-entropy, `-y log(p) - (1 - y) log(1 - p)`.

    Args:
      logits: outputs of any shape; p is their sigmoid.
      labels: y, in 0..1, of the same shape.
      ignore_label: as in `crossentropy`.
      label_smoothing: how far labels move toward 1/2: 0.1 turns 0 into 0.05 and 1 into 0.95.
      from_logits: False for outputs that are probabilities, which are clipped to 1e-7..1 - 1e-7.

    Raises:
      ValueError: the shapes differ, or `label_smoothing` is outside 0..1.

    >>> binary_crossentropy(np.zeros(3), np.array([0, 1, 1])).shape
    (3,)
    """
    check_same_shape("binary_crossentropy", logits, labels, "labels")
    check_share("binary_crossentropy", "label_smoothing", label_smoothing)

    def of_bits(logits: jax.Array, labels: jax.Array) -> jax.Array:
        labels = floating(labels)
        labels = smoothed_bits(labels, label_smoothing) if label_smoothing else labels
        if from_logits:
            return optax.sigmoid_binary_cross_entropy(certain_bits(logits, labels), labels)
        return of_probabilities(logits, labels)

    return _values(of_bits, floating(logits), jnp.asarray(labels), ignore_label)


def of_probabilities(probabilities: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes the elementwise cross-entropy of labels in 0..1 and probabilities."""
    shares = clipped(probabilities)
    return -labels * jnp.log(shares) - (1 - labels) * jnp.log(1 - shares)


@public
def kl_divergence(
    logits: ArrayLike, probabilities: ArrayLike, *, from_logits: bool = True
) -> jax.Array:
    """Computes the Kullback-Leibler divergence `sum(q (log(q) - log(p)))`, p the softmax.

    Args:
      logits: `(batch, ..., classes)`; p is their softmax.
      probabilities: q, of the same shape.
      from_logits: False for outputs that are probabilities. As in Keras, all are clipped to
        1e-7..1 then.

    Raises:
      ValueError: the shapes differ.

    >>> kl_divergence(np.zeros((2, 4)), np.full((2, 4), 0.25))
    Array([0., 0.], dtype=float32)
    """
    check_same_shape("kl_divergence", logits, probabilities)
    logits, probabilities = floating(logits), floating(probabilities)
    if from_logits:
        logs = but_ruled_out(jax.nn.log_softmax(logits), probabilities)
        return optax.kl_divergence(logs, probabilities)
    logits, probabilities = (jnp.clip(x, EPSILON, 1) for x in (logits, probabilities))
    return optax.kl_divergence(jnp.log(logits), probabilities)


def check_labels(name: str, outputs: ArrayLike, labels: ArrayLike) -> None:
    """Checks that there is an integer label for each row of outputs."""
    shape, wanted = np.shape(outputs), np.shape(outputs)[:-1]
    if len(shape) < 2 or shape[-1] == 1:
        if np.shape(labels)[:-1] == shape:
            raise ValueError(
                f"loss {name!r} takes outputs first: it got outputs {shape} and labels "
                f"{np.shape(labels)}. A loss is called with (outputs, targets): swap its arguments."
            )
        raise ValueError(
            f"loss {name!r} expects one output per class, of shape (batch, ..., classes), got "
            f"outputs {shape}. For a single score per example use loss='binary_crossentropy'."
        )
    dtype = labels.dtype if hasattr(labels, "dtype") else np.asarray(labels).dtype
    if np.shape(labels) != wanted or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"loss {name!r} expects integer labels of shape {wanted} for outputs of shape "
            f"{shape}, got labels {np.shape(labels)} {dtype}. "
            + _label_advice(np.shape(labels), wanted, shape)
        )


def _label_advice(labels: tuple[int, ...], wanted: tuple[int, ...], shape: tuple[int, ...]) -> str:
    if labels == wanted:
        return "Cast them: y.astype('int32')."
    if labels == shape:
        return "Use loss='onehot_crossentropy' for one-hot labels."
    if labels == (*wanted, 1):
        index = "[:, 0]" if len(labels) == 2 else "[..., 0]"
        return f"Squeeze them (y{index}), or use loss='onehot_crossentropy' for one-hot labels."
    return "Each example needs one label per row of outputs."
