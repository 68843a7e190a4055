"""Copies of placed arrays, which outlive the donation of the originals."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@functools.cache
def copy_to(sharding: Any) -> Callable[[Any], Any]:
    """Makes a compiled function that copies a tree to a sharding; None: each to its own.

    It copies a few arrays faster than `jax.device_put`.
    """
    return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=sharding)


def copied(tree: Any, sharding: Any = None) -> Any:
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
