"""Arrays of less than a byte per element, which not every JAX can hand to compiled programs."""

import functools

import jax
import jax.numpy as jnp

from flaxfit.tree._types import ArrayLike, PyTree


def check_sub_byte(arguments: tuple[PyTree, ...]) -> None:
    """Checks that a compiled program can be called with such arrays, where there are any.

    >>> check_sub_byte(({"w": jnp.ones(2)},))

    Raises:
      NotImplementedError: this version of JAX cannot.
    """
    for leaf in jax.tree.leaves(arguments):
        if _bits(leaf) < 8 and not _is_possible(leaf.dtype.name):
            raise NotImplementedError(
                f"JAX {jax.__version__} cannot call a compiled program with arrays of "
                f"{leaf.dtype}, such as one of the shape {leaf.shape} in the state or the batch: "
                "keep them as int8, or upgrade JAX."
            )


def _bits(leaf: ArrayLike) -> int:
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 8


@functools.cache
def _is_possible(dtype: str) -> bool:
    # Of an array that is bound to its device, JAX compares the layout with that of the program.
    array = jax.device_put(jnp.zeros(2, dtype), jax.local_devices()[0])
    try:
        jax.block_until_ready(jax.jit(lambda x: x).lower(array).compile()(array))
    except Exception:
        return False
    return True
