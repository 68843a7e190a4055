"""The labels that a loss takes, and what it makes of a batch that holds others."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from flaxfit.losses._functions import (
    binary_crossentropy,
    crossentropy,
    hinge,
    not_a_class,
    onehot_crossentropy,
)
from flaxfit.tree._types import ArrayLike, PyTree

# Soft labels, such as those of mixup, are rounded.
_ROUNDING = 1e-3


class Labels(NamedTuple):
    """The labels that a loss takes."""

    allowed: str
    """Which, in words."""
    owner: str
    """What takes them, in words."""
    are_wrong: Callable[[Any], Any]
    """By element, whether labels are others; of arrays of NumPy and of JAX."""
    stand_in: int
    """A label that it takes."""


def labels_for(loss: Any, outputs: PyTree) -> Labels | None:
    """The labels that a loss takes for outputs of this shape; None: any, or it is not known.

    >>> labels = labels_for(crossentropy, np.zeros((2, 10)))
    >>> labels.allowed, labels.are_wrong(np.array([0, 10]))
    ('0..9', array([False,  True]))
    """
    if loss is crossentropy and np.ndim(outputs):
        n = np.shape(outputs)[-1]
        return Labels(f"0..{n - 1}", f"{n} outputs", lambda y: not_a_class(y, n), 0)
    if loss is binary_crossentropy or loss is onehot_crossentropy:
        return Labels("0..1", f"loss {loss.__name__!r}", _not_a_share, 0)
    if loss is hinge:
        return Labels("-1 or 1", "loss 'hinge'", lambda y: (y != 1) & (y != -1), 1)
    return None


def out_of_range(loss: Any, *outputs_and_targets: PyTree) -> Any:
    """Marks the values of a loss whose label is out of range; None if it takes any label.

    >>> out_of_range(crossentropy, np.zeros((3, 2)), np.array([0, -1, 2]))
    Array([False,  True,  True], dtype=bool)
    """
    labels, targets = _labels_and_targets(loss, outputs_and_targets)
    if labels is None:
        return None
    wrong = labels.are_wrong(targets)
    return wrong.any(-1) if loss is onehot_crossentropy else wrong


def in_range(loss: Any, *outputs_and_targets: PyTree) -> Any:
    """What a loss returns, with values of 0 where a label is out of range.

    Their gradients are 0, too.

    >>> in_range(crossentropy, np.zeros((3, 1, 2)), np.array([[-1], [2], [1]])).round(2)
    Array([[0.  ],
           [0.  ],
           [0.69]], dtype=float32)
    """
    labels, targets = _labels_and_targets(loss, outputs_and_targets)
    if labels is None:
        return loss(*outputs_and_targets)
    stand_in = jnp.asarray(labels.stand_in, targets.dtype)
    targets = jnp.where(labels.are_wrong(targets), stand_in, targets)
    values = loss(outputs_and_targets[0], targets)
    return jnp.where(out_of_range(loss, *outputs_and_targets), 0, values)


def _not_a_share(labels: ArrayLike) -> Any:
    return ~((labels >= -_ROUNDING) & (labels <= 1 + _ROUNDING))  # Of NaN, too.


def _labels_and_targets(loss: Any, given: tuple[Any, ...]) -> tuple[Labels | None, Any]:
    """The labels that a loss takes, and those given, where it is given a single array of them."""
    if len(given) != 2 or not all(hasattr(each, "shape") for each in given):
        return None, None
    return labels_for(loss, given[0]), jnp.asarray(given[1])
