"""Random keys as plain arrays, for programs whose results hold keys are called slowly."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def key_types(leaves: Sequence[Any]) -> dict[int, Any]:
    """The kinds of those leaves that are random keys, by their positions.

    >>> list(key_types([jnp.ones(2), jax.random.key(0)]))
    [1]
    """
    return {
        i: jax.random.key_impl(leaf)
        for i, leaf in enumerate(leaves)
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
    }


def without_types(leaves: Sequence[Any], types: Mapping[int, Any]) -> list[Any]:
    """The leaves with the data of keys in the place of the keys.

    >>> leaves = [jnp.ones(2), jax.random.key(0)]
    >>> without_types(leaves, key_types(leaves))[1].dtype
    dtype('uint32')
    """
    return [jax.random.key_data(leaf) if i in types else leaf for i, leaf in enumerate(leaves)]
