"""Weights of examples or tokens, finite and nonnegative, possibly per output."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.tree import Array, PyTree, is_array, product, which_count

OTHER_OUTPUTS = ""
"""The key of the weights of all outputs without their own key."""


def of_output(weights: PyTree, name: str) -> PyTree:
    """Returns the weights of one output, from example weights or weights by output."""
    if isinstance(weights, Mapping):
        return weights.get(name, weights.get(OTHER_OUTPUTS))
    return weights


def by_output(weights: PyTree, names: Sequence[str] = ()) -> PyTree:
    """Converts a list or tuple of weights to a mapping by output; other weights are unchanged.

    Outputs are called "output_0", "output_1" and so on, as in a list of losses. None means equal
    weights.

    >>> by_output([np.ones(2), None])
    {'output_0': array([1., 1.])}

    Raises:
      ValueError: the outputs have other names, so a list is ambiguous.
    """
    if not isinstance(weights, list | tuple):
        return weights
    if len(weights) == 1 and not names:
        return weights[0]
    if names and len(weights) != len(names):
        raise ValueError(
            f"There are weights for {len(weights)} outputs, and the model has losses for "
            f"{len(names)}: {', '.join(names)}."
        )
    numbered = [f"output_{i}" for i in range(len(weights))]
    names = names or numbered
    if len(names) > 1 and [*names] != numbered:
        raise ValueError(
            "Cannot tell which weights in a list or a tuple belong to which of the outputs "
            f"{', '.join(map(repr, names))}: pass them as a mapping, such as {{{names[0]!r}: ...}}."
        )
    return {n: each for n, each in zip(names, weights, strict=True) if each is not None} or None


def is_list_of_weights(weights: PyTree) -> bool:
    """Returns whether weights are a list or tuple of arrays, one per output, not of numbers."""
    return isinstance(weights, list | tuple) and any(map(is_array, weights))


def without_masked(targets: PyTree, weights: PyTree) -> tuple[PyTree, PyTree]:
    """Fills masked NumPy targets, and returns them with weights of 0 at the mask.

    >>> without_masked(np.ma.masked_equal([3.0, -1.0], -1.0), None)
    (array([3., 0.]), array([1., 0.], dtype=float32))
    """
    is_single = isinstance(targets, list | tuple) and len(targets) == 1
    target = targets[0] if is_single else targets
    if not isinstance(target, np.ma.MaskedArray) or isinstance(weights, list | Mapping):
        return targets, weights
    counts = ~np.ma.getmaskarray(target)
    # A mask that is constant along trailing axes becomes a weight per example or token.
    while counts.ndim > 1 and (counts == counts[..., :1]).all():
        counts = counts[..., 0]
    counts = counts.astype(np.float32)
    weights = counts if weights is None else product(np.asarray(weights), counts)
    return np.ma.filled(target, 0), weights


def times(weights: PyTree, factor: Array) -> PyTree:
    """Multiplies weights, also weights by output, by a factor for each example."""
    if isinstance(weights, Mapping):
        named = {name: product(each, factor) for name, each in weights.items()}
        return {OTHER_OUTPUTS: factor, **named}
    return factor if weights is None else product(weights, factor)


def without_idle_rows(values: PyTree, weights: Array | None) -> PyTree:
    """Replaces the rows of weight 0 by the first row that counts.

    Rows of weight 0 may hold anything, but 0 times a NaN gradient is NaN. With weights per token,
    elements of weight 0 that are not finite become 0, for the same reason.

    >>> without_idle_rows(jnp.array([jnp.nan, 3.0, 4.0]), jnp.array([0.0, 1.0, 1.0]))
    Array([3., 3., 4.], dtype=float32)
    """
    if weights is None:
        return values
    rows = which_count(weights, weights.shape[:1])
    first = jnp.argmax(rows)

    def replaced(value: jax.Array) -> jax.Array:
        if value.shape[:1] != rows.shape:  # A batch with arrays of different lengths.
            return value
        row = value[first]
        row = jnp.where(jnp.isfinite(row), row, jnp.zeros_like(row))  # If no row counts.
        value = jnp.where(rows.reshape(-1, *(1,) * row.ndim), value, row)
        if weights.ndim == 1 or not jnp.issubdtype(value.dtype, jnp.inexact):
            return value
        return jnp.where(which_count(weights, value.shape) | jnp.isfinite(value), value, 0)

    return jax.tree.map(replaced, values)


def without_idle_targets(batch: PyTree) -> PyTree:
    """Replaces the targets in rows of weight 0, unless the outputs have their own weights."""
    if isinstance(batch.weights, Mapping):
        return batch
    return batch._replace(targets=without_idle_rows(batch.targets, batch.weights))


def check_weights_shape(weights: PyTree, name: str) -> None:
    """Checks that weights, possibly by output, have an example axis."""
    if isinstance(weights, Mapping):
        for output, each in weights.items():
            if isinstance(each, Mapping):
                raise TypeError(f"{name}[{output!r}] must be an array of weights, got a mapping.")
            check_weights_shape(each, f"{name}[{output!r}]")
    elif not np.ndim(weights):
        raise ValueError(
            f"{name} must hold one number per example, of shape (batch,), or the leading axes of "
            f"the values of the loss, such as (batch, tokens); got the scalar {weights!r:.60}."
        )


def check_weights(weights: PyTree, name: str) -> None:
    """Checks that weights, possibly by output, are finite and not negative."""
    if isinstance(weights, Mapping):
        for output, each in weights.items():
            check_weights(each, f"{name}[{output!r}]")
        return
    weights = np.asarray(weights)
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        first = np.unravel_index(bad.argmax(), bad.shape)
        raise ValueError(
            f"{name} must be finite and not negative: {bad.sum():,} of {bad.size:,} are not, "
            f"the first of them {weights[first]} in row {first[0]:,}. A weight of 0 leaves an "
            "example or a token out."
        )
