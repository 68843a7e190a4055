"""A function whose rule of derivatives combines rows."""

import jax
import jax.numpy as jnp


@jax.custom_jvp
def centered_slopes(x):
    """Computes tanh(x), row by row."""
    return jnp.tanh(x)


@centered_slopes.defjvp
def _centered(x, direction):
    return centered_slopes(x[0]), direction[0] - direction[0].mean(0)
