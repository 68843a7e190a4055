"""Losses and gradient norms of recent steps, and whether a step is a spike among them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

LENGTH = 128
"""The number of recent steps to keep."""
ENOUGH = LENGTH // 2
"""The number of recorded steps before a step may count as a spike."""
_LEAST_SPREAD = 1e-3
"""The smallest standard deviation, relative to the mean: that of a constant loss is 0."""


class Recent(NamedTuple):
    """The loss and the norm of the gradient in recent steps: a ring."""

    values: jax.Array
    """Losses and norms, `(2, LENGTH)`; each step replaces the one `LENGTH` steps before."""
    n_steps: jax.Array
    """The number of steps that were recorded."""


def no_recent() -> Recent:
    """Returns the ring before the first step."""
    return Recent(jnp.zeros((2, LENGTH), jnp.float32), jnp.int32(0))


def stands_out(
    recent: Recent, loss: jax.Array, norm: jax.Array, n_deviations: float
) -> tuple[jax.Array, Recent]:
    """Returns whether a step is a spike, and the ring with that step.

    A spike is a loss or a norm that lies more than `n_deviations` standard deviations above the
    mean of the ring. The ring records it clipped to that threshold, so that one spike does not hide
    the next, and the mean still adapts to a lasting change.
    """
    is_known = jnp.arange(LENGTH) < recent.n_steps
    n = jnp.clip(recent.n_steps, 1, LENGTH).astype(jnp.float32)
    mean = jnp.sum(jnp.where(is_known, recent.values, 0), -1) / n
    squares = jnp.where(is_known, (recent.values - mean[:, None]) ** 2, 0)
    spread = jnp.maximum(jnp.sqrt(jnp.sum(squares, -1) / n), _LEAST_SPREAD * jnp.abs(mean))
    limit = jnp.where(recent.n_steps < ENOUGH, jnp.inf, mean + n_deviations * spread)
    observed = jnp.stack([loss, norm]).astype(jnp.float32)
    values = recent.values.at[:, recent.n_steps % LENGTH].set(jnp.minimum(observed, limit))
    return jnp.any(observed > limit), Recent(values, recent.n_steps + 1)
