"""Weights: one number per example, finite and not negative, or such a number for each output."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.tree._types import ArrayLike, PyTree

OTHER_OUTPUTS = ""
"""The key of the weights of all outputs that weights by output do not name."""


def of_output(weights: PyTree, name: str) -> PyTree:
    """The weights of one output, from weights of the examples or by output."""
    if isinstance(weights, Mapping):
        return weights.get(name, weights.get(OTHER_OUTPUTS))
    return weights


def times(weights: PyTree, factor: ArrayLike) -> PyTree:
    """Multiplies weights, of the examples or by output, by a factor for each example."""
    if isinstance(weights, Mapping):
        return {name: each * factor for name, each in {OTHER_OUTPUTS: 1, **weights}.items()}
    return factor if weights is None else weights * factor


def without_idle_rows(values: PyTree, weights: ArrayLike | None) -> PyTree:
    """Values whose rows of weight 0 are replaced by the first row that counts.

    These rows may hold anything, and 0 times a gradient that is NaN is NaN.

    >>> without_idle_rows(jnp.array([jnp.nan, 3.0, 4.0]), jnp.array([0.0, 1.0, 1.0]))
    Array([3., 3., 4.], dtype=float32)
    """
    if weights is None:
        return values
    counts = weights != 0
    first = jnp.argmax(counts)

    def replaced(value: jax.Array) -> jax.Array:
        row = value[first]
        row = jnp.where(jnp.isfinite(row), row, jnp.zeros_like(row))  # If no row counts.
        return jnp.where(counts.reshape(-1, *(1,) * row.ndim), value, row)

    return jax.tree.map(replaced, values)


def without_idle_targets(batch: PyTree) -> PyTree:
    """Replaces the targets of a batch in rows of weight 0, except where outputs have weights."""
    if isinstance(batch.weights, Mapping):
        return batch
    return batch._replace(targets=without_idle_rows(batch.targets, batch.weights))


def check_weights_shape(weights: PyTree, name: str) -> None:
    """Checks that weights, or those of each output, are one number per example."""
    if isinstance(weights, Mapping):
        for output, each in weights.items():
            if isinstance(each, Mapping):
                raise TypeError(f"{name}[{output!r}] must be an array of weights, got a mapping.")
            check_weights_shape(each, f"{name}[{output!r}]")
    elif np.ndim(weights) != 1:
        raise ValueError(
            f"{name} must hold one number per example, of shape (batch,), got the shape "
            f"{np.shape(weights)}. To mask the steps of sequences, make the mask a second target, "
            "(x, (y, mask), mask.sum(-1)), and return the mean over the steps of each sequence: "
            "jnp.where(mask, values, 0).sum(-1) / mask.sum(-1). Its weight is the number of its "
            "steps."
        )


def check_weights(weights: PyTree, name: str) -> None:
    """Checks that weights, or those of each output, are finite and not negative."""
    if isinstance(weights, Mapping):
        for output, each in weights.items():
            check_weights(each, f"{name}[{output!r}]")
        return
    weights = np.asarray(weights)
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        row = bad.argmax()
        raise ValueError(
            f"{name} must be finite and not negative: {bad.sum():,} of {len(weights):,} are not, "
            f"the first of them {weights[row]} in row {row:,}. A weight of 0 leaves an example out."
        )
