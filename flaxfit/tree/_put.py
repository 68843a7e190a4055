"""Places arrays by their shardings, and copies them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flaxfit.tree._dtypes import is_key
from flaxfit.tree._types import ArrayLike, PyTree


def put(
    array: ArrayLike, sharding: jax.sharding.Sharding, *, may_alias: bool | None = None
) -> jax.Array:
    """Calls `jax.device_put`; also places on other processes' devices, and random keys.

    Every process holds the whole array.
    """
    if sharding.is_fully_addressable or getattr(array, "sharding", None) == sharding:
        array = array if may_alias is not False else _copied_on_host(array)
        return jax.device_put(array, sharding, may_alias=may_alias)
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return jax.device_put(array, sharding)
    if is_key(array):
        data = put(np.asarray(jax.random.key_data(array)), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    host, copy = np.asarray(array), np.asarray if may_alias is not False else np.array
    return jax.make_array_from_callback(host.shape, sharding, lambda index: copy(host[index]))


def put_like(array: ArrayLike, like: object, dtype: np.dtype | None = None) -> jax.Array:
    """Copies a host array to the sharding of another array; moves a JAX array only if needed.

    No device holds more than its part. Without a sharding the copy is on JAX's default device.
    """
    sharding = sharding_of(like)
    if isinstance(array, jax.Array):
        return array if sharding is None else put(array, sharding)
    if sharding is None:
        return jnp.asarray(_copied_on_host(array), dtype)
    return put(np.asarray(array, dtype), sharding, may_alias=False)


def copied(tree: PyTree) -> PyTree:
    """Copies the arrays of a tree where they are.

    >>> x = jnp.ones(2)
    >>> copied({"x": x})["x"] is x
    False
    """

    def copy(x: ArrayLike) -> jax.Array:
        if isinstance(x, jax.Array) and not isinstance(x, Tracer):
            # `jnp.copy` would compile a program for each shape.
            return jax.device_put(x, sharding_of(x), may_alias=False)
        return jnp.asarray(_copied_on_host(x))

    return jax.tree.map(copy, tree)


def _copied_on_host(x: ArrayLike) -> ArrayLike:
    """Copies a host array, whose memory JAX may keep, or read after its call has returned."""
    return np.array(x) if isinstance(x, np.ndarray) else x


def sharding_of(like: object) -> jax.sharding.Sharding | None:
    """Returns the sharding of an array or description; None: JAX's default device.

    >>> sharding_of(jnp.zeros(2)) is None
    True
    """
    if isinstance(like, jax.Array):
        return like.sharding if like.committed else None
    return getattr(like, "sharding", None)
