"""Weights: one number per example, finite and not negative, or such a number for each output."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.tree._types import ArrayLike, PyTree

OTHER_OUTPUTS = ""
"""The key of the weights of all outputs that weights by output do not name."""


def of_output(weights: PyTree, name: str) -> Any:
    """The weights of one output, from weights of the examples or by output.

    >>> of_output({"a": 2.0, OTHER_OUTPUTS: 1.0}, "a"), of_output(3.0, "a")
    (2.0, 3.0)
    """
    return (
        weights.get(name, weights.get(OTHER_OUTPUTS)) if isinstance(weights, Mapping) else weights
    )


def times(weights: PyTree, factor: ArrayLike) -> Any:
    """Multiplies weights, of the examples or by output, by a factor for each example."""
    if isinstance(weights, Mapping):
        return {name: each * factor for name, each in {OTHER_OUTPUTS: 1, **weights}.items()}
    return factor if weights is None else weights * factor


def without_idle_rows(values: PyTree, weights: ArrayLike | None) -> Any:
    """Values in whose rows of weight 0 stands the first row that counts.

    Anything may stand there, and 0 times the gradient of a loss that is no number is none either.

    >>> without_idle_rows(jnp.array([jnp.nan, 3.0, 4.0]), jnp.array([0.0, 1.0, 1.0]))
    Array([3., 3., 4.], dtype=float32)
    """
    if weights is None:
        return values
    counts = weights != 0
    first = jnp.argmax(counts)

    def replaced(value: jax.Array) -> jax.Array:
        row = value[first]
        row = jnp.where(jnp.isfinite(row), row, jnp.zeros_like(row))  # Where none of them counts.
        return jnp.where(counts.reshape(-1, *(1,) * row.ndim), value, row)

    return jax.tree.map(replaced, values)


def check_weights_shape(weights: ArrayLike, name: str) -> None:
    """Checks that weights are one number per example, or those of each output.

    >>> check_weights_shape(np.ones(4), "sample_weight")

    Raises:
      ValueError: they have another number of dimensions.
    """
    if isinstance(weights, Mapping):
        for output, each in weights.items():
            check_weights_shape(each, f"{name}[{output!r}]")
    elif np.ndim(weights) != 1:
        raise ValueError(
            f"{name} must hold one number per example, of shape (batch,), got the shape "
            f"{np.shape(weights)}. To mask the steps of sequences, make the mask a second target, "
            "(x, (y, mask), mask.sum(-1)), and return the mean over the steps of each sequence: "
            "jnp.where(mask, values, 0).sum(-1) / mask.sum(-1). Its weight is the number of its "
            "steps."
        )


def check_weights(weights: ArrayLike, name: str) -> None:
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
