"""Decides which functions are compiled ahead of time."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from flaxfit.tree import ArrayLike, PyTree, check_jit


def can_call(arguments: tuple[PyTree, ...], options: Mapping[str, str] | None = None) -> bool:
    """Returns whether JAX can call a program that was compiled ahead for these arguments.

    If not, JAX compiles the function at its first call.

    Raises:
      RuntimeError: `jax.disable_jit` is on.
      NotImplementedError: it cannot, but there are compiler options, which need that.
    """
    check_jit()
    for leaf in jax.tree.leaves(arguments):
        if _bits(leaf) < 8 and not _takes_sub_byte(leaf.dtype.name):
            if options is None:
                return False
            raise NotImplementedError(
                f"JAX {jax.__version__} cannot call a program that was compiled with options with "
                f"arrays of {leaf.dtype}, such as one of the shape {leaf.shape} in the state or "
                "the batch: keep them as int8, leave virtual_replicas out, or upgrade JAX."
            )
    return True


def _bits(leaf: ArrayLike) -> int:
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 8


@functools.cache
def _takes_sub_byte(dtype: str) -> bool:
    """Returns whether this JAX can call compiled programs with arrays of sub-byte elements."""
    # Commit the array: JAX compares only a committed array's layout with the program's.
    array = jax.device_put(jnp.zeros(2, dtype), jax.local_devices()[0])
    try:
        jax.block_until_ready(jax.jit(lambda x: x).lower(array).compile()(array))
    except Exception:
        return False
    return True
