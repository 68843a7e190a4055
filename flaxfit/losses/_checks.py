"""Checks of what a loss returns and of the labels that it takes."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.losses._crossentropy import (
    binary_crossentropy,
    crossentropy,
    not_a_class,
    onehot_crossentropy,
)
from flaxfit.losses._ctc import ctc
from flaxfit.losses._focal import (
    binary_focal_crossentropy,
    categorical_focal_crossentropy,
    generalized_crossentropy,
)
from flaxfit.losses._hinge import categorical_hinge, hinge, squared_hinge
from flaxfit.losses._names import Loss, resolve
from flaxfit.losses._overlap import dice, summed_axes, tversky
from flaxfit.tree import Array, ArrayLike, PyTree

_ROUNDING = 1e-3  # Allowed for soft labels, such as mixup's.
_OF_CLASSES = (crossentropy, generalized_crossentropy, ctc)
_OF_ROWS = (onehot_crossentropy, categorical_focal_crossentropy, categorical_hinge)
_OF_MASKS = (dice, tversky)
_OF_SHARES = (binary_crossentropy, binary_focal_crossentropy, *_OF_ROWS, *_OF_MASKS)
_OF_SIGNS = (hinge, squared_hinge)


class Labels(NamedTuple):
    """The labels that a loss accepts."""

    allowed: str
    """The accepted labels, for messages."""
    owner: str
    """What the labels are for, such as "10 outputs", for messages."""
    are_wrong: Callable[[Array], Array]
    """Returns a mask of the labels that are not accepted."""
    stand_in: int
    """An accepted label, to replace wrong ones."""


def labels_for(loss: Loss, outputs: ArrayLike) -> Labels | None:
    """Returns the labels that a loss accepts for outputs of this shape; None: any."""
    loss, options = _unwrapped(loss)
    known, label = _labels_for(loss, outputs, options), options.get("ignore_label")
    if known is None or label is None:
        return known
    return known._replace(
        allowed=f"{known.allowed} or {label}",
        are_wrong=lambda y: known.are_wrong(y) & (y != label),
    )


def _labels_for(loss: Loss, outputs: ArrayLike, options: Mapping[str, Any]) -> Labels | None:
    if _is_one_of(_OF_CLASSES, loss) and np.ndim(outputs):
        n = np.shape(outputs)[options.get("axis", -1)]
        return Labels(f"0..{n - 1}", f"{n} outputs", lambda y: not_a_class(y, n), 0)
    name = f"loss {getattr(loss, '__name__', '')!r}"
    if _is_one_of(_OF_SHARES, loss):
        return Labels("0..1", name, _not_a_share, 0)
    if _is_one_of(_OF_SIGNS, loss):
        return Labels("-1 or 1", name, lambda y: (y != 1) & (y != -1), 1)
    return None


def _unwrapped(loss: Loss) -> tuple[Loss, Mapping[str, Any]]:
    """Returns a loss without its options, and the options."""
    if isinstance(loss, functools.partial) and not loss.args:
        return loss.func, loss.keywords
    return loss, {}


def _is_one_of(losses: Sequence[Loss], loss: Loss) -> bool:
    return any(loss is each for each in losses)


def out_of_range(loss: Loss, *outputs_and_targets: PyTree) -> Array | None:
    """Marks the values of a loss whose label is out of range; None if it takes any label."""
    labels = _labels_of_call(loss, outputs_and_targets)
    if labels is None:
        return None
    return _by_value(loss, labels.are_wrong(jnp.asarray(outputs_and_targets[1])))


def in_range(loss: Loss, *outputs_and_targets: PyTree) -> PyTree:
    """Computes the loss, with values and gradients of 0 where a label is out of range."""
    labels = _labels_of_call(loss, outputs_and_targets)
    if labels is None:
        return loss(*outputs_and_targets)
    outputs, targets = outputs_and_targets[0], jnp.asarray(outputs_and_targets[1])
    wrong, stand_in = labels.are_wrong(targets), jnp.asarray(labels.stand_in, targets.dtype)
    found = loss(outputs, jnp.where(wrong, stand_in, targets))
    values, *weights = found if isinstance(found, tuple) else (found,)
    values = jnp.where(_by_value(loss, wrong), 0, values)
    return (values, *weights) if weights else values


def check_values(loss: str | Loss, outputs: PyTree, targets: PyTree) -> None:
    """Checks on the host that a loss of `flaxfit.losses` accepts the values of labels.

    Args:
      loss: what `resolve` takes. For any other function nothing is checked.
      outputs: a pytree of arrays or of their shapes and dtypes; only the last axis is read, so that
        the labels of a whole data set can be checked against the outputs of one batch.
      targets: the labels, arrays on the host.

    >>> check_values("crossentropy", np.ones((2, 10)), np.array([3, 12]))
    Traceback (most recent call last):
    ValueError: label 12 is out of range for 10 outputs (labels must be 0..9). Out of range: 1 ...

    Raises:
      ValueError: labels are out of range; the message gives their number and an extreme one.
    """
    loss, outputs, targets = resolve(loss), jax.tree.leaves(outputs), jax.tree.leaves(targets)
    if len(outputs) != 1 or len(targets) != 1 or not targets[0].size:
        return
    labels = np.asarray(targets[0])
    known = labels_for(loss, outputs[0])
    if known is None or not (wrong := known.are_wrong(labels)).any():
        return
    lowest, highest = labels[wrong].min(), labels[wrong].max()
    label = lowest if lowest < 0 else highest
    advice = " Make 2 * y - 1 of labels 0 and 1." if _is_one_of(_OF_SIGNS, loss) else ""
    if label < 0 and lowest == highest and _is_one_of((crossentropy, binary_crossentropy), loss):
        advice = f" To leave them out: flaxfit.losses.{loss.__name__}(ignore_label={label})."
    raise ValueError(
        f"label {label} is out of range for {known.owner} (labels must be {known.allowed}). "
        f"Out of range: {wrong.sum():,} of {labels.size:,} labels.{advice}"
    )


def check_loss_shape(
    values_shape: tuple[int, ...], outputs: PyTree, targets: PyTree, batch_size: int
) -> None:
    """Checks that a loss returned a scalar or values `(batch, ...)`, without broadcasting.

    Args:
      values_shape: the shape of what the loss returned.
      outputs: a pytree of arrays or of their shapes and dtypes.
      targets: the targets of the batch.
      batch_size: the number of examples.

    >>> check_loss_shape((32,), (np.ones((32, 10)),), (np.ones(32),), 32)

    Raises:
      ValueError: the shape is wrong, or outputs and targets were broadcast to it.
    """
    values_shape = tuple(values_shape)
    received = f"the loss returned shape {values_shape}; expected () or ({batch_size},)."
    shapes, others = ([x.shape for x in jax.tree.leaves(tree)] for tree in (outputs, targets))
    for shape, other in itertools.product(shapes, others):
        if _broadcasts_to(values_shape, shape, other):
            raise ValueError(
                f"{received} Outputs {shape} broadcast against targets {other}: reshape one of "
                "them."
            )
    if values_shape and values_shape[0] != batch_size:
        raise ValueError(
            f"{received} Return one value per example, or their mean: do not sum over the examples."
        )


def _broadcasts_to(
    values: tuple[int, ...], outputs: tuple[int, ...], targets: tuple[int, ...]
) -> bool:
    """Returns whether values have the broadcast shape, and neither outputs nor targets do."""
    try:
        broadcast = np.broadcast_shapes(outputs, targets)
    except ValueError:
        return False
    # A per-token loss, (batch, tokens), has the leading axes of outputs or targets.
    is_natural = values in (outputs[: len(values)], targets[: len(values)])
    return values == broadcast and not is_natural


def _not_a_share(labels: Array) -> Array:
    return ~((labels >= -_ROUNDING) & (labels <= 1 + _ROUNDING))  # Marks NaN, too.


def _by_value(loss: Loss, wrong_labels: Array) -> Array:
    """Returns a mask of the loss values with a wrong label."""
    loss, options = _unwrapped(loss)
    if _is_one_of(_OF_ROWS, loss):
        return wrong_labels.any(options.get("axis", -1))
    if _is_one_of(_OF_MASKS, loss):
        return wrong_labels.any(summed_axes("", options.get("axis"), wrong_labels.ndim))
    return wrong_labels.any(-1) if loss is ctc else wrong_labels


def _labels_of_call(loss: Loss, arguments: tuple[PyTree, ...]) -> Labels | None:
    """Returns the labels that a loss accepts, if called with one output and one target."""
    if len(arguments) != 2 or not all(hasattr(each, "shape") for each in arguments):
        return None
    return labels_for(loss, arguments[0])
