"""put: places an array that every process holds whole by a sharding over all processes."""

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.tree._types import ArrayLike


def put(
    array: ArrayLike, sharding: jax.sharding.Sharding, *, may_alias: bool | None = None
) -> jax.Array:
    """As `jax.device_put`, also onto the devices of other processes, and of random keys."""
    if sharding.is_fully_addressable or getattr(array, "sharding", None) == sharding:
        return jax.device_put(array, sharding, may_alias=may_alias)
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return jax.device_put(array, sharding)
    if jnp.issubdtype(jnp.result_type(array), jax.dtypes.prng_key):
        data = put(np.asarray(jax.random.key_data(array)), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
