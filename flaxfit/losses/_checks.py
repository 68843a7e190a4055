"""Checks of what a loss is given and gives: the values of labels, the shape of what it returns."""

import itertools
from typing import Any

import jax
import numpy as np

from flaxfit.losses._functions import (
    binary_crossentropy,
    crossentropy,
    hinge,
    onehot_crossentropy,
)
from flaxfit.losses._names import Loss, resolve


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
    """Checks on the host that the values of labels suit one of the losses of `flaxfit.losses`.

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
