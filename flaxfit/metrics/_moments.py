"""Weighted moments as sums that lose no digits, however far from zero the numbers lie."""

from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.metrics._metric import weighted
from flaxfit.tree import ArrayLike

# A variance is a small difference of large sums, which float32 cannot hold. So each batch takes its
# moments about its own center, and adds them about zero in windows of 8 bits: a window holds
# integer multiples of its unit, which add without rounding.
_WINDOW = 8
_UNITS = tuple(2.0**e for e in range(-120, 128, _WINDOW))
# Squares of tiny numbers underflow: a batch of tiny numbers is scaled, and summed separately.
_TINY, _SCALE = 2.0**-40, 2.0**64


def moments(values: jax.Array, weights: jax.Array, others: jax.Array | None = None) -> jax.Array:
    """Returns the sums of w, w x, w y and w x y as `(scales, 4, windows, ...)`.

    y is `others`, or x if that is None. Values whose weight is 0 are ignored.
    """
    pair = jnp.stack([values, values if others is None else others])
    is_tiny = jnp.where(weights != 0, jnp.abs(pair), 0).max((0, 1)) < _TINY
    weight, pair = weights.sum(0), pair * jnp.where(is_tiny, _SCALE, 1).astype(pair.dtype)
    center = jnp.take_along_axis(pair, weights.argmax(0)[None, None], 1)
    mean = weighted(pair - center, weights).sum(1, keepdims=True)
    center += mean / jnp.where(weight > 0, weight, 1)  # Exact if all values are equal.
    center = jnp.where(weight > 0, center, 0)
    away = pair - center
    (a, b), (one, other) = center[:, 0], weighted(away, weights).sum(1)
    products = _product(a, other), _product(b, one)
    found = jnp.stack(
        [
            _windows(_product(weight)),
            _windows(_product(weight, a), _product(one)),
            _windows(_product(weight, b), _product(other)),
            _windows(
                _product(weight, a, b), *products, _product(weighted(away.prod(0), weights).sum(0))
            ),
        ]
    )
    return jnp.stack([jnp.where(is_tiny, 0, found), jnp.where(is_tiny, found, 0)])


def spread(sums: ArrayLike) -> np.ndarray:
    """Returns `sum(w (x - mean(x)) (y - mean(y)))`; NaN without weight.

    >>> float(spread(jax.jit(moments)(np.float32([1e7, 1e7 + 2]), np.float32([1, 1]))))
    2.0
    """
    return _of_columns(sums, lambda weight, one, other, both: both - one * other / weight)


def offset(sums: ArrayLike) -> np.ndarray:
    """Returns `sum(w) (mean(x) - mean(y))**2`."""
    return _of_columns(sums, lambda weight, one, other, _: (one - other) ** 2 / weight)


def squares(sums: ArrayLike) -> np.ndarray:
    """Returns `sum(w x**2)`."""
    return _of_columns(sums, lambda weight, one, other, both: both)


def _of_columns(sums: ArrayLike, value: Callable[..., Fraction]) -> np.ndarray:
    sums = np.asarray(sums, np.float64)
    columns = sums.reshape(2, 4, len(_UNITS), -1).transpose(3, 1, 0, 2)
    return np.reshape([_of_column(each, value) for each in columns], sums.shape[3:])


def _of_column(column: np.ndarray, value: Callable[..., Fraction]) -> float:
    if not np.isfinite(column).all():
        return np.nan
    plain, tiny = ([sum(map(Fraction, each)) for each in of] for of in column.swapaxes(0, 1))
    scale = Fraction(1 / _SCALE)
    parts = [a + b * c for a, b, c in zip(plain, tiny, (1, scale, scale, scale**2), strict=True)]
    return float(value(*parts)) if parts[0] else np.nan


def _product(*factors: jax.Array) -> jax.Array:
    """Returns the product as parts that sum to it without rounding: `(parts, ...)`."""
    # Each factor becomes three pieces of 8 bits: the product of up to three pieces has at most 24
    # bits, which float32 holds exactly.
    product = jnp.ones_like(factors[0])[None]
    for factor in factors:
        n_bits = jnp.finfo(factor.dtype).nexp, _WINDOW - 1
        high = jax.lax.reduce_precision(factor, *n_bits)
        middle = jax.lax.reduce_precision(factor - high, *n_bits)
        pieces = jnp.stack([high, middle, factor - high - middle])
        product = (product[:, None] * pieces).reshape(-1, *factor.shape)
    return product


def _windows(*products: jax.Array) -> jax.Array:
    """Returns the sum of products in windows of 8 bits: `(windows, ...)`."""
    parts = jnp.concatenate(products)[:, None]
    units = jnp.asarray(_UNITS, parts.dtype).reshape(-1, *[1] * (parts.ndim - 2))
    # A part this large is a multiple of the unit already, and the division might overflow.
    is_whole = jnp.abs(parts) >= units * 2.0 ** (jnp.finfo(parts.dtype).nmant + 1)
    # A window keeps the digits between its unit and the next larger one.
    cut = jnp.where(is_whole, parts, jnp.trunc(parts / units) * units)
    above = jnp.concatenate([cut[:, 1:], jnp.zeros_like(cut[:, :1])], 1)
    return (cut - above).sum(0)
