"""Losses by name: Optax's per-example losses behind checks of shapes, dtypes and label values.

Every loss takes `(outputs, targets)` and returns values of shape `(batch, ...)`; flaxfit takes
their weighted mean. Classification losses take logits. Optax broadcasts in silence where shapes
differ; the losses here refuse, with the shapes that they got.

>>> crossentropy(np.array([[2.0, 0.0], [2.0, 0.0]]), np.array([0, 1])) > 1
Array([False,  True], dtype=bool)
"""

import difflib
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Loss = Callable[..., Any]


def crossentropy(logits: Any, labels: Any) -> Any:
    """Gives the negative log-likelihood of integer labels under the softmax of the logits.

    Args:
      logits: `(batch, ..., classes)`.
      labels: integers of shape `(batch, ...)`.

    >>> crossentropy(np.zeros((3, 4)), np.array([0, 1, 3])).shape
    (3,)
    """
    shape, wanted = np.shape(logits), np.shape(logits)[:-1]
    if len(shape) < 2 or shape[-1] == 1:
        raise ValueError(
            "loss 'crossentropy' wants one output per class, of shape (batch, ..., classes), got "
            f"outputs {shape}. For a single score per example use loss='binary_crossentropy'."
        )
    is_integer = jnp.issubdtype(_dtype(labels), jnp.integer)
    if np.shape(labels) != wanted or not is_integer:
        raise ValueError(
            f"loss 'crossentropy' wants integer labels of shape {wanted} for outputs of shape "
            f"{shape}, got labels {np.shape(labels)} {_dtype(labels)}. "
            + _label_advice(np.shape(labels), wanted, shape)
        )
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    n_classes = shape[-1]
    # To the bit optax.softmax_cross_entropy_with_integer_labels, but the label's logit is selected,
    # not gathered: the gradient of a gather is a scatter, which takes a small model a while.
    labels = labels.astype(jnp.int32)  # The number of classes may not fit a narrower type.
    labels = jnp.where(labels < 0, labels + n_classes, labels)
    of_label = jnp.where(jnp.arange(n_classes) == labels[..., None], logits, 0).sum(-1)
    values = jax.nn.logsumexp(logits, axis=-1) - of_label
    return jnp.where((labels >= 0) & (labels < n_classes), values, jnp.nan)


def onehot_crossentropy(logits: Any, labels: Any) -> Any:
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
    return optax.softmax_cross_entropy(jnp.asarray(logits), _floating(labels))


def binary_crossentropy(logits: Any, labels: Any) -> Any:
    """Gives the cross-entropy between labels in 0..1 and the sigmoid of the logits, by element.

    >>> binary_crossentropy(np.zeros(3), np.array([0, 1, 1])).shape
    (3,)
    """
    _check_same_shape("binary_crossentropy", logits, labels, "labels")
    return optax.sigmoid_binary_cross_entropy(jnp.asarray(logits), _floating(labels))


def mse(outputs: Any, targets: Any) -> Any:
    """Gives the squared differences, by element.

    >>> mse(np.array([1.0, 5.0]), np.array([1.0, 3.0]))
    Array([0., 4.], dtype=float32)
    """
    _check_same_shape("mse", outputs, targets)
    return jnp.square(_floating(outputs) - _floating(targets))


def mae(outputs: Any, targets: Any) -> Any:
    """Gives the absolute differences, by element.

    >>> mae(np.array([1.0, 5.0]), np.array([1.0, 3.0]))
    Array([0., 2.], dtype=float32)
    """
    _check_same_shape("mae", outputs, targets)
    return jnp.abs(_floating(outputs) - _floating(targets))


def huber(outputs: Any, targets: Any) -> Any:
    """Gives the squared error up to a difference of 1 and the absolute error beyond, by element.

    >>> huber(np.array([1.0, 5.0]), np.array([1.0, 3.0]))
    Array([0. , 1.5], dtype=float32)
    """
    _check_same_shape("huber", outputs, targets)
    return optax.huber_loss(_floating(outputs), _floating(targets))


def log_cosh(outputs: Any, targets: Any) -> Any:
    """Gives the logarithm of the hyperbolic cosine of the differences, by element.

    >>> log_cosh(np.array([1.0, 5.0]), np.array([1.0, 3.0])).round(3)
    Array([0.   , 1.325], dtype=float32)
    """
    _check_same_shape("log_cosh", outputs, targets)
    return optax.log_cosh(_floating(outputs), _floating(targets))


def hinge(scores: Any, labels: Any) -> Any:
    """Gives how far scores fall short of a margin of 1; labels are -1 or 1, by element.

    >>> hinge(np.array([0.5, 5.0]), np.array([-1, 1]))
    Array([1.5, 0. ], dtype=float32)
    """
    _check_same_shape("hinge", scores, labels, "labels")
    return optax.hinge_loss(_floating(scores), _floating(labels))


def kl_divergence(logits: Any, probabilities: Any) -> Any:
    """Gives the Kullback-Leibler divergence of the softmax of the logits from given probabilities.

    >>> kl_divergence(np.zeros((2, 4)), np.full((2, 4), 0.25))
    Array([0., 0.], dtype=float32)
    """
    _check_same_shape("kl_divergence", logits, probabilities)
    return optax.kl_divergence(jax.nn.log_softmax(_floating(logits)), _floating(probabilities))


def cosine_distance(outputs: Any, targets: Any) -> Any:
    """Gives one minus the cosine of the angle between vectors along the last axis.

    >>> cosine_distance(np.array([[0.0, 1.0]]), np.array([[2.0, 0.0]]))
    Array([1.], dtype=float32)
    """
    _check_same_shape("cosine_distance", outputs, targets)
    return optax.cosine_distance(_floating(outputs), _floating(targets), epsilon=1e-8)


_LOSSES: dict[str, Loss] = {
    loss.__name__: loss
    for loss in (
        crossentropy,
        onehot_crossentropy,
        binary_crossentropy,
        mse,
        mae,
        huber,
        log_cosh,
        hinge,
        kl_divergence,
        cosine_distance,
    )
}

_ALIASES: dict[str, Loss] = {
    "cross_entropy": crossentropy,
    "sparse_categorical_crossentropy": crossentropy,
    "categorical_crossentropy": onehot_crossentropy,
    "bce": binary_crossentropy,
    "squared_error": mse,
    "mean_squared_error": mse,
    "absolute_error": mae,
    "mean_absolute_error": mae,
    "huber_loss": huber,
    "logcosh": log_cosh,
    "kld": kl_divergence,
}

_CHECKED_INSTEAD: dict[Loss, Loss] = {
    optax.softmax_cross_entropy_with_integer_labels: crossentropy,
    optax.softmax_cross_entropy: onehot_crossentropy,
    optax.sigmoid_binary_cross_entropy: binary_crossentropy,
}


def resolve(loss: str | Loss) -> Loss:
    """Finds the loss function that a user means by a name or a function.

    A function comes back as it is, except for the Optax losses that broadcast in silence: these
    become the checked ones of this module, which compute the same.

    >>> resolve("mean_squared_error") is mse
    True

    Raises:
      ValueError: no loss has that name.
      TypeError: neither a name nor a function.
    """
    if isinstance(loss, str):
        known = _LOSSES | _ALIASES
        if loss in known:
            return known[loss]
        nearest = difflib.get_close_matches(loss.lower(), known, cutoff=0.5) or _LOSSES
        raise ValueError(f"There is no loss {loss!r}. Did you mean {', '.join(nearest)}?")
    if not callable(loss):
        raise TypeError(
            "A loss must be a name or a function (*outputs, *targets) -> values, got "
            f"{type(loss).__name__}: {loss!r:.60}"
        )
    try:
        return _CHECKED_INSTEAD.get(loss, loss)
    except TypeError:  # A callable object need not be hashable.
        return loss


def check_loss_shape(
    values_shape: tuple[int, ...], outputs: Any, targets: Any, batch_size: int
) -> None:
    """Checks that a loss returned a scalar or values of shape `(batch, ...)`, not by broadcasting.

    Args:
      values_shape: the shape of what the loss returned.
      outputs: a pytree of arrays or of their shapes and dtypes.
      targets: likewise.
      batch_size: the number of examples.

    >>> check_loss_shape((32,), (np.ones((32, 10)),), (np.ones(32),), 32)

    Raises:
      ValueError: the shape is neither, or outputs and targets were broadcast to it.
    """
    values_shape = tuple(values_shape)
    received = f"the loss returned shape {values_shape}; expected () or ({batch_size},)."
    shapes, others = ([x.shape for x in jax.tree.leaves(tree)] for tree in (outputs, targets))
    for shape, other in itertools.product(shapes, others):
        if _broadcasts_to(values_shape, shape, other):
            raise ValueError(
                f"{received} A {shape} output against {other} targets broadcasts: reshape one of "
                "them."
            )
    if values_shape and values_shape[0] != batch_size:
        raise ValueError(
            f"{received} Return one value per example, or their mean: do not sum over the examples."
        )


def check_values(loss: str | Loss, outputs: Any, targets: Any) -> None:
    """Checks on the host that the values of labels suit a loss; knows the losses of this module.

    Args:
      loss: what `resolve` takes. For any other function nothing is checked.
      outputs: a pytree of arrays or of their shapes and dtypes; only the last axis is read, so that
        the labels of a whole data set can be checked against the outputs of one batch.
      targets: the labels, arrays on the host.

    >>> check_values("crossentropy", np.ones((2, 10)), np.array([3, 12]))
    Traceback (most recent call last):
    ValueError: label 12 is out of range for 10 outputs (labels must be 0..9).

    Raises:
      ValueError: a label is out of range, with the lowest or highest of them.
    """
    loss, outputs, targets = resolve(loss), jax.tree.leaves(outputs), jax.tree.leaves(targets)
    if len(outputs) != 1 or len(targets) != 1 or not targets[0].size:
        return
    labels = np.asarray(targets[0])
    if loss is crossentropy:
        n_outputs = outputs[0].shape[-1]
        _check_range(labels, n_outputs - 1, f"{n_outputs} outputs")
    elif loss is binary_crossentropy or loss is onehot_crossentropy:
        _check_range(labels, 1, f"loss {loss.__name__!r}")
    elif loss is hinge and not (is_valid := np.abs(labels) == 1).all():
        raise ValueError(
            f"label {labels[~is_valid][0]} is out of range for loss 'hinge' (labels must be -1 or "
            "1). Make 2 * y - 1 of labels 0 and 1."
        )


def _check_range(labels: np.ndarray, highest: int, what: str) -> None:
    lowest_label, highest_label = labels.min(), labels.max()
    if not (lowest_label >= 0 and highest_label <= highest):
        wrong = highest_label if lowest_label >= 0 else lowest_label
        raise ValueError(f"label {wrong} is out of range for {what} (labels must be 0..{highest}).")


def _broadcasts_to(
    values: tuple[int, ...], outputs: tuple[int, ...], targets: tuple[int, ...]
) -> bool:
    """Whether values have the shape that outputs and targets broadcast to, and neither has."""
    try:
        broadcast = np.broadcast_shapes(outputs, targets)
    except ValueError:
        return False
    # A loss by token, (batch, tokens), has the leading axes of one of them.
    is_natural = values in (outputs[: len(values)], targets[: len(values)])
    return values == broadcast and not is_natural


def _check_same_shape(name: str, outputs: Any, targets: Any, what: str = "targets") -> None:
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


def _dtype(array: Any) -> Any:
    return array.dtype if hasattr(array, "dtype") else np.asarray(array).dtype


def _floating(array: Any) -> Any:
    """As floating-point numbers, so that integer targets (uint8!) do not wrap around."""
    array = jnp.asarray(array)
    return array if jnp.issubdtype(array.dtype, jnp.inexact) else array.astype(jnp.float32)
