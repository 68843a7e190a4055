"""Checks of weights, which are one number per example: finite, and none negative."""

from typing import Any

import numpy as np


def check_weights_shape(weights: Any, name: str) -> None:
    """Checks that weights are one number per example.

    >>> check_weights_shape(np.ones(4), "sample_weight")

    Raises:
      ValueError: they have another number of dimensions.
    """
    if np.ndim(weights) != 1:
        raise ValueError(
            f"{name} must hold one number per example, of shape (batch,), got the shape "
            f"{np.shape(weights)}. To weight or mask the steps of a sequence, make the mask a "
            "second target, (x, (y, mask)), and multiply the values of the loss by it."
        )


def check_weights(weights: Any, name: str) -> None:
    """Checks that weights are finite and not negative.

    >>> check_weights(np.array([0.0, 2.0]), "sample_weight")

    Raises:
      ValueError: with how many are not, and the first of them.
    """
    weights = np.asarray(weights)
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        row = bad.argmax()
        raise ValueError(
            f"{name} must be finite and not negative: {bad.sum():,} of {len(weights):,} are not, "
            f"the first of them {weights[row]} in row {row:,}. A weight of 0 leaves an example out."
        )
