"""Totals: sums over many steps, added up on the device without losing the small ones."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Totals = tuple[Any, Any]
"""A tree of sums, and for each the part that rounding has cut off so far."""


def zero_totals(sums: Any) -> Totals:
    """Empty totals on the host, for sums of these shapes and dtypes."""
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), sums)
    return zeros, jax.tree.map(np.zeros_like, zeros)


def add(totals: Totals, sums: Any) -> Totals:
    """Adds sums to totals, exactly to about twice the precision of their dtype.

    A plain float32 total stops growing at 2**24 examples. This is Knuth's two-sum: the rounding
    error of each addition is kept (D. Knuth, The Art of Computer Programming 2, 4.2.2).
    """
    highs, structure = jax.tree.flatten(totals[0])
    lows = jax.tree.leaves(totals[1])
    pairs = [
        _two_sum(*item) for item in zip(highs, lows, structure.flatten_up_to(sums), strict=True)
    ]
    return structure.unflatten(p[0] for p in pairs), structure.unflatten(p[1] for p in pairs)


def read(totals: Totals) -> Any:
    """The sums as float64 (or integer) arrays on the host; waits for the device."""
    highs, lows = jax.device_get(totals)

    def whole(high: Any, low: Any) -> Any:
        high = np.asarray(high)
        if not jnp.issubdtype(high.dtype, jnp.floating):
            return high
        return high.astype(np.float64) + np.asarray(low).astype(np.float64)

    return jax.tree.map(whole, highs, lows)


def _two_sum(high: jax.Array, low: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = jnp.asarray(x, high.dtype)
    total = high + x
    if not jnp.issubdtype(total.dtype, jnp.inexact):
        return total, low
    part = total - high
    error = (high - (total - part)) + (x - part)
    # Sums that have overflowed have no error worth keeping (inf - inf is nan).
    return total, low + jnp.where(jnp.isfinite(total), error, 0)
