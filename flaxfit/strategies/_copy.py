"""Copies arrays that may be donated or overwritten; gathers those spread over devices."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from flaxfit.tree import Array, ArrayLike, Function, PyTree, is_key


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


def gather(tree: PyTree) -> PyTree:
    """Gathers a tree of arrays that are spread over devices into NumPy arrays on the host.

    With several processes, all must call it, and each receives all arrays. Moves one array at a
    time. Random keys stay keys.

    >>> gather({"w": jax.numpy.ones(2)})
    {'w': array([1., 1.], dtype=float32)}
    """
    return jax.tree.map(_whole, tree)


def _whole(x: ArrayLike) -> ArrayLike:
    if not isinstance(x, jax.Array):
        return x
    if is_key(x):
        return jax.random.wrap_key_data(_whole(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    if x.is_fully_addressable:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)
