"""Copies of arrays: of placed ones that are donated, and of host memory that may be written to."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.tree._types import PyTree


@functools.cache
def copy_to(sharding: Any) -> Callable[[Any], Any]:
    """Makes a compiled function that copies a tree to a sharding; None: each to its own.

    It copies a few arrays faster than `jax.device_put`.
    """
    return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=sharding)


def copied(tree: PyTree, sharding: Any = None) -> PyTree:
    """Returns a copy of a tree of arrays, at a sharding or, for None, each at its own.

    >>> x = jnp.ones(2)
    >>> copied({"x": x})["x"] is x
    False
    """
    if jax.sharding.get_abstract_mesh().empty:
        return copy_to(sharding)(tree)
    # The devices of a mesh that the user has set are those of compiled functions, too.
    places = jax.tree.map(lambda x: x.sharding if sharding is None else sharding, tree)
    return jax.device_put(tree, places, may_alias=False)


def unaliased(x: np.ndarray) -> np.ndarray:
    """Returns a NumPy array, or a copy if a program on a CPU would use its very memory.

    JAX does so with memory that is aligned to 64 bytes, which a program reads after the call has
    returned: a source that writes its next batch there would change the batch before.
    """
    if x.flags.writeable and x.__array_interface__["data"][0] % 64 == 0:
        return x.copy()
    return x
