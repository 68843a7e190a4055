"""The losses of single examples: Optax's, behind checks of shapes and dtypes."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxfit.tree._functions import by_row
from flaxfit.tree._types import Array, ArrayLike, LossFn


def configurable(loss: LossFn) -> LossFn:
    """Makes a loss that is called with options alone return itself with these options."""

    @functools.wraps(loss)
    def configured(*arguments: ArrayLike, **options: Any) -> Any:
        if not arguments:
            return functools.partial(configured, **options)
        return loss(*arguments, **options)

    # It is the loss itself, not something around it.
    attributes = vars(configured)
    attributes["__signature__"] = inspect.signature(attributes.pop("__wrapped__"))
    return configured


@configurable
@by_row
def crossentropy(
    logits: ArrayLike, labels: ArrayLike, *, ignore_label: int | None = None
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Gives the negative log-likelihood of integer labels under the softmax of the logits.

    Args:
      logits: `(batch, ..., classes)`.
      labels: integers of shape `(batch, ...)`. A label outside `0..classes - 1` gives NaN.
      ignore_label: a label that does not count, such as -100. The loss is then `(values, weights)`,
        with the weight 0 where it stands. `crossentropy(ignore_label=-100)` is the loss with it.

    >>> crossentropy(np.zeros((3, 4)), np.array([0, 1, 3])).shape
    (3,)
    >>> crossentropy(ignore_label=-100)(np.zeros((2, 4)), np.array([0, -100]))[1]
    Array([1., 0.], dtype=float32)
    """
    shape, wanted = np.shape(logits), np.shape(logits)[:-1]
    if len(shape) < 2 or shape[-1] == 1:
        if np.shape(labels)[:-1] == shape:
            raise ValueError(
                f"loss 'crossentropy' takes outputs first: it got outputs {shape} and labels "
                f"{np.shape(labels)}. A loss is called with (outputs, targets): swap its arguments."
            )
        raise ValueError(
            "loss 'crossentropy' wants one output per class, of shape (batch, ..., classes), got "
            f"outputs {shape}. For a single score per example use loss='binary_crossentropy'."
        )
    dtype = labels.dtype if hasattr(labels, "dtype") else np.asarray(labels).dtype
    if np.shape(labels) != wanted or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"loss 'crossentropy' wants integer labels of shape {wanted} for outputs of shape "
            f"{shape}, got labels {np.shape(labels)} {dtype}. "
            + _label_advice(np.shape(labels), wanted, shape)
        )
    logits, labels = floating(logits), jnp.asarray(labels)
    if ignore_label is not None:
        return _without_label(crossentropy, logits, labels, ignore_label)
    n_classes = shape[-1]
    # Unlike optax.softmax_cross_entropy_with_integer_labels, this does not count negative labels
    # from the end, and selects the label's logit instead of gathering it: the gradient of a gather
    # is a scatter, which is slow for small models. Subtracting the largest logit first keeps the
    # digits of the loss where logits are large.
    largest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    logits = logits - jnp.where(jnp.isfinite(largest), largest, 0)
    of_label = jnp.where(
        jnp.arange(n_classes) == labels[..., None].astype(jnp.int32), logits, 0
    ).sum(-1)
    values = jnp.log(jnp.exp(logits).sum(-1)) - of_label
    return jnp.where(not_a_class(labels, n_classes), jnp.nan, values)


def _without_label(
    loss: LossFn, logits: ArrayLike, labels: ArrayLike, label: float
) -> tuple[jax.Array, jax.Array]:
    """The values of a loss, and weights that are 0 where the label is the given one."""
    labels = jnp.asarray(labels)
    counts = labels != label
    values = jnp.asarray(loss(logits, jnp.where(counts, labels, 0)))
    return jnp.where(counts, values, 0), counts.astype(jnp.float32)


def not_a_class(labels: Array, n_classes: int) -> Array:
    """Marks the integer labels outside `0..n_classes - 1`."""
    if labels.dtype.itemsize < 4:  # The number of classes may not fit.
        labels = labels.astype(np.int32)
    return (labels < 0) | (labels >= n_classes)


@by_row
def onehot_crossentropy(logits: ArrayLike, labels: ArrayLike) -> jax.Array:
    """Gives the cross-entropy between label distributions (one-hot or soft) and the softmax.

    >>> onehot_crossentropy(np.zeros((3, 4)), np.eye(4)[:3]).shape
    (3,)
    """
    shape = np.shape(logits)
    if np.shape(labels) != shape or len(shape) < 2 or shape[-1] == 1:
        raise ValueError(
            f"loss 'onehot_crossentropy' wants one-hot labels of the shape of the outputs, "
            f"(batch, ..., classes), got outputs {shape} and labels {np.shape(labels)}. "
            "Use loss='crossentropy' for integer labels, 'binary_crossentropy' for single scores."
        )
    return optax.softmax_cross_entropy(floating(logits), floating(labels))


@configurable
@by_row
def binary_crossentropy(
    logits: ArrayLike, labels: ArrayLike, *, ignore_label: float | None = None
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Gives the cross-entropy between labels in 0..1 and the sigmoid of the logits, by element.

    Args:
      logits: of any shape.
      labels: of the same shape.
      ignore_label: as of `crossentropy`.

    >>> binary_crossentropy(np.zeros(3), np.array([0, 1, 1])).shape
    (3,)
    """
    _check_same_shape("binary_crossentropy", logits, labels, "labels")
    if ignore_label is not None:
        return _without_label(binary_crossentropy, logits, labels, ignore_label)
    return optax.sigmoid_binary_cross_entropy(floating(logits), floating(labels))


@by_row
def mse(outputs: ArrayLike, targets: ArrayLike) -> jax.Array:
    """Gives the squared differences, by element.

    >>> mse(np.array([1.0, 5.0]), np.array([1.0, 3.0]))
    Array([0., 4.], dtype=float32)
    """
    _check_same_shape("mse", outputs, targets)
    return jnp.square(floating(outputs) - floating(targets))


@by_row
def mae(outputs: ArrayLike, targets: ArrayLike) -> jax.Array:
    """Gives the absolute differences, by element.

    >>> mae(np.array([1.0, 5.0]), np.array([1.0, 3.0]))
    Array([0., 2.], dtype=float32)
    """
    _check_same_shape("mae", outputs, targets)
    errors = floating(outputs) - floating(targets)
    return jnp.where(errors == 0, 0, jnp.abs(errors))  # The slope of JAX's abs at 0 is 1.


@by_row
def huber(outputs: ArrayLike, targets: ArrayLike) -> jax.Array:
    """Gives the squared error up to a difference of 1 and the absolute error beyond, by element.

    >>> huber(np.array([1.0, 5.0]), np.array([1.0, 3.0]))
    Array([0. , 1.5], dtype=float32)
    """
    _check_same_shape("huber", outputs, targets)
    return optax.huber_loss(floating(outputs), floating(targets))


@by_row
def log_cosh(outputs: ArrayLike, targets: ArrayLike) -> jax.Array:
    """Gives the logarithm of the hyperbolic cosine of the differences, by element.

    >>> log_cosh(np.array([1.0, 5.0]), np.array([1.0, 3.0])).round(3)
    Array([0.   , 1.325], dtype=float32)
    """
    _check_same_shape("log_cosh", outputs, targets)
    return optax.log_cosh(floating(outputs), floating(targets))


@by_row
def hinge(scores: ArrayLike, labels: ArrayLike) -> jax.Array:
    """Gives the shortfall of scores to a margin of 1, by element; labels are -1 or 1.

    >>> hinge(np.array([0.5, 5.0]), np.array([-1, 1]))
    Array([1.5, 0. ], dtype=float32)
    """
    _check_same_shape("hinge", scores, labels, "labels")
    return optax.hinge_loss(floating(scores), floating(labels))


def kl_divergence(logits: ArrayLike, probabilities: ArrayLike) -> jax.Array:
    """Gives the Kullback-Leibler divergence of the softmax of the logits from given probabilities.

    >>> kl_divergence(np.zeros((2, 4)), np.full((2, 4), 0.25))
    Array([0., 0.], dtype=float32)
    """
    _check_same_shape("kl_divergence", logits, probabilities)
    return optax.kl_divergence(jax.nn.log_softmax(floating(logits)), floating(probabilities))


def cosine_distance(outputs: ArrayLike, targets: ArrayLike) -> jax.Array:
    """Gives one minus the cosine of the angle between vectors along the last axis.

    >>> cosine_distance(np.array([[0.0, 1.0]]), np.array([[2.0, 0.0]]))
    Array([1.], dtype=float32)
    """
    _check_same_shape("cosine_distance", outputs, targets)
    return optax.cosine_distance(floating(outputs), floating(targets), epsilon=1e-8)


def _check_same_shape(
    name: str, outputs: ArrayLike, targets: ArrayLike, what: str = "targets"
) -> None:
    shape, received = np.shape(outputs), np.shape(targets)
    if shape == received:
        return
    advice = "Reshape one of them."
    if received == (*shape, 1):
        advice = f"Squeeze the {what} (y[..., 0])."
    elif shape == (*received, 1):
        advice = f"Give the {what} a last axis (y[..., None]), or squeeze the outputs."
    raise ValueError(
        f"loss {name!r} wants {what} of the shape of the outputs, got outputs {shape} and {what} "
        f"{received}. {advice}"
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


def floating(array: ArrayLike) -> jax.Array:
    """Casts to float32 or wider: integers (uint8!) wrap around, 16 bits hold too few digits."""
    array = jnp.asarray(array)
    is_wide = jnp.issubdtype(array.dtype, jnp.inexact) and array.dtype.itemsize >= 4
    return array if is_wide else array.astype(jnp.float32)
