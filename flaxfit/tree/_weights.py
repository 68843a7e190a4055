"""Weights of values: per example, per token, or for any leading axes of the values."""

import jax
import jax.numpy as jnp

from flaxfit.tree._types import Array

Shape = tuple[int, ...]


def beside(weights: Array, shape: Shape, owner: str = "An array") -> Array:
    """Adds axes to weights, so that they broadcast to values from the left.

    >>> beside(jnp.ones((4, 3)), (4, 3, 2)).shape, beside(jnp.ones((4, 1)), (4,)).shape
    ((4, 3, 1), (4,))

    Raises:
      ValueError: the axes of the weights are not leading axes of the values.
    """
    fitted = _fitted(weights.shape, shape)
    if fitted is None:
        raise ValueError(
            f"{owner} has values of shape {shape} and weights of shape {weights.shape}, which do "
            "not broadcast from the left: weights have the leading axes of the values, such as "
            "(batch,) for one weight per example or (batch, tokens) for values of that shape. "
            "Reshape the weights, or return one value for each of them."
        )
    return weights.reshape(fitted)


def broadcast_weights(weights: Array, shape: Shape, owner: str = "An array") -> jax.Array:
    """Broadcasts weights from the left to the shape of values; see `beside`."""
    return jnp.broadcast_to(beside(weights, shape, owner), shape)


def which_count(weights: Array, shape: Shape) -> Array:
    """Returns a mask of nonzero weights, with axes to broadcast to an array of a shape.

    If the weights belong to other axes than the array's, an example counts if any of its weights
    is nonzero.
    """
    counts = weights != 0
    if fits(counts.shape, shape):
        return beside(counts, shape)
    return counts.reshape(len(counts), -1).any(1).reshape(-1, *(1,) * len(shape[1:]))


def joined_weights(own: Array, weights: Array | None, shape: Shape, owner: str) -> jax.Array:
    """Multiplies weights that a loss or metric returned by the weights of the batch.

    Per-example values ignore the examples whose tokens all have the weight 0.
    """
    found = broadcast_weights(own, shape, owner)
    if weights is None:
        return found
    is_beside = fits(weights.shape, shape)
    return found * (beside(weights, shape) if is_beside else which_count(weights, shape))


def product(one: Array, other: Array) -> Array:
    """Multiplies weights of a batch by others, such as example weights."""
    n = max(one.ndim, other.ndim)
    one, other = (x.reshape(x.shape + (1,) * (n - x.ndim)) for x in (one, other))
    return one * other


def fits(weights: Shape, values: Shape) -> bool:
    """Returns whether weights of a shape broadcast to values from the left."""
    return _fitted(weights, values) is not None


def _fitted(weights: Shape, values: Shape) -> Shape | None:
    """Returns the shape that makes weights broadcast from the left, or None."""
    while len(weights) > len(values) and weights[-1] == 1:
        weights = weights[:-1]
    if len(weights) > len(values) or weights[:1] != values[:1]:
        return None
    if any(w not in (1, n) for w, n in zip(weights, values, strict=False)):
        return None
    return weights + (1,) * (len(values) - len(weights))
