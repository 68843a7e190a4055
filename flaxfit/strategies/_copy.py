"""Copies arrays that may be donated, and host memory that may be overwritten."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.tree import Array, Function, PyTree


def copied(tree: PyTree, sharding: jax.sharding.Sharding | None = None) -> PyTree:
    """Copies a tree of arrays to a sharding; None: each array keeps its own."""
    if jax.sharding.get_abstract_mesh().empty:
        return _copy_to(sharding)(tree)  # Faster than `jax.device_put` for a few arrays.
    # Not `jit`: it would use the devices of a mesh that the user has set.
    places = jax.tree.map(lambda x: x.sharding if sharding is None else sharding, tree)
    return jax.device_put(tree, places, may_alias=False)


@functools.cache
def _copy_to(sharding: jax.sharding.Sharding | None) -> Function:
    return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=sharding)


def placed_copy(tree: PyTree, share: Callable[[PyTree], PyTree]) -> PyTree:
    """Places a copy of a tree by `share`; the originals may be changed or donated afterwards."""
    placed = copied(share(tree))
    if any(isinstance(x, np.ndarray) for x in jax.tree.leaves(tree)):
        jax.block_until_ready(placed)  # A copy on a CPU may read the NumPy arrays until then.
    return placed


def unaliased(x: Array) -> Array:
    """Copies a NumPy array that can be written to; returns any other array unchanged.

    JAX may read its memory after a call has returned: a source that reuses the memory for its next
    batch would change the previous one.
    """
    return x.copy() if isinstance(x, np.ndarray) and x.flags.writeable else x
