"""Weighted moments as sums that lose no digits, however far from zero the numbers lie."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.metrics._metric import weighted
from flaxfit.tree._types import ArrayLike

# The variance is a small difference of large sums, which float32 cannot hold. So each batch takes
# its moments about a center of its own, and adds them about zero in windows of 8 bits: a window
# holds whole multiples of its unit, which add without rounding.
_WINDOW = 8
_UNITS = tuple(2.0**e for e in range(-120, 128, _WINDOW))


def moments(values: jax.Array, weights: jax.Array) -> jax.Array:
    """The weights, the values and their squares, added over the first axis: `(3, windows, ...)`.

    Values whose weight is 0 are ignored.
    """
    weight = weights.sum(0)
    center = jnp.take_along_axis(values, weights.argmax(0)[None], 0)[0]
    mean = weighted(values - center, weights).sum(0) / jnp.where(weight > 0, weight, 1)
    center = jnp.where(weight > 0, center + mean, 0)  # Of equal values, exactly the value.
    differences = values - center
    first = weighted(differences, weights).sum(0)
    second = weighted(jnp.square(differences), weights).sum(0)
    return jnp.stack(
        [
            _windows(_product(weight)),
            _windows(_product(weight, center), _product(first)),
            _windows(
                _product(weight, center, center), 2 * _product(center, first), _product(second)
            ),
        ]
    )


def spread(sums: ArrayLike) -> np.ndarray:
    """The weighted sum of squared differences from the mean, from `moments`; NaN without weight.

    >>> float(spread(jax.jit(moments)(np.float32([1e7, 1e7 + 2]), np.float32([1, 1]))))
    2.0
    """
    sums = np.asarray(sums, np.float64)
    found = [_spread(*part) for part in sums.reshape(3, len(_UNITS), -1).transpose(2, 0, 1)]
    return np.reshape(found, sums.shape[2:])


def _spread(*windows: np.ndarray) -> float:
    if not np.isfinite(windows).all():
        return np.nan
    weight, first, second = (sum(map(Fraction, window)) for window in windows)
    return float(second - first * first / weight) if weight else np.nan


def _product(*factors: jax.Array) -> jax.Array:
    """The product as parts that add up to it without rounding: `(parts, ...)`."""
    product = jnp.ones_like(factors[0])[None]
    for factor in factors:
        n_bits = jnp.finfo(factor.dtype).nexp, _WINDOW - 1
        high = jax.lax.reduce_precision(factor, *n_bits)
        middle = jax.lax.reduce_precision(factor - high, *n_bits)
        pieces = jnp.stack([high, middle, factor - high - middle])
        product = (product[:, None] * pieces).reshape(-1, *factor.shape)
    return product


def _windows(*products: jax.Array) -> jax.Array:
    """The sum of products in windows of 8 bits: `(windows, ...)`."""
    parts = jnp.concatenate(products)[:, None]
    units = jnp.asarray(_UNITS, parts.dtype).reshape(-1, *[1] * (parts.ndim - 2))
    is_whole = jnp.abs(parts) >= units * 2.0 ** (jnp.finfo(parts.dtype).nmant + 1)
    cut = jnp.where(is_whole, parts, jnp.trunc(parts / units) * units)
    above = jnp.concatenate([cut[:, 1:], jnp.zeros_like(cut[:, :1])], 1)
    return (cut - above).sum(0)
