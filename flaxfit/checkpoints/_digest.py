"""The digest of an array: a checksum of its content that does not depend on its sharding."""

import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.tree._context_mesh import without_mesh
from flaxfit.tree._types import Array, ArrayLike

Source: TypeAlias = str | np.ndarray
"""A digest, or the memory to compute it from later."""


@without_mesh()
def digest(array: ArrayLike) -> str:
    """Returns sixteen hexadecimal digits that change when any bit of an array changes or moves.

    Every element is mixed with its position, and the results are summed modulo 2**32. Sums of
    integers do not depend on their order, so the digest is the same for every sharding, mesh and
    number of processes, and nothing is gathered. It guards against damage, not against an
    adversary.
    """
    if isinstance(array, jax.Array):
        # The copies of a replicated array are equal: one of them is enough.
        words = array.addressable_data(0) if array.is_fully_replicated else array
    else:
        words = _host_words(np.asarray(array))
    # Reading the result at once bounds the collectives in flight.
    return "".join(f"{int(lane):08x}" for lane in np.asarray(_lanes(words)))


def digest_or_source(array: Array) -> Source:
    """Returns the digest of an array, or its memory if another thread may compute it later.

    A NumPy array must not change until then. The digest is computed at once if that takes several
    devices, whose programs must run in one order, or if the memory is an accelerator's: there it is
    fast, and the array may be donated.
    """
    if isinstance(array, jax.Array) and array.is_fully_replicated and array.is_fully_addressable:
        array = array.addressable_data(0)
        if next(iter(array.devices())).platform == "cpu":
            return np.asarray(array)  # A view, for which the memory is kept.
    return array if isinstance(array, np.ndarray) else digest(array)


def as_digest(source: Source) -> str:
    """Returns the digest for a result of `digest_or_source`."""
    return source if isinstance(source, str) else digest(source)


def _host_words(array: np.ndarray) -> np.ndarray:
    """Splits elements of 64 bits or more into words of 32, as JAX would cut them."""
    return array.reshape(-1).view(np.uint32) if array.dtype.itemsize >= 8 else array


@jax.jit
def _lanes(array: jax.Array) -> jax.Array:
    words = _device_words(array)
    # The seed keeps the words zero at position zero from vanishing.
    mixed = _mix(words ^ _mix(_positions(words.shape) + jnp.uint32(0x9E3779B9)))
    second = (mixed ^ (mixed >> 15)) * jnp.uint32(0x2C1B3C6D)
    lanes = mixed, second ^ (second >> 12)
    return jnp.stack([jnp.sum(lane, dtype=jnp.uint32) for lane in lanes])


def _device_words(array: jax.Array) -> jax.Array:
    """Returns the bits of every element as one uint32, or several along a last axis."""
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    bits = (jnp.finfo if is_float else jnp.iinfo)(array.dtype).bits
    unsigned = jnp.dtype(f"uint{min(bits, 32)}")
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def _positions(shape: tuple[int, ...]) -> jax.Array:
    positions = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        positions += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    return positions


def _mix(words: jax.Array) -> jax.Array:
    """Mixes 32-bit words so that every bit reaches every other (MurmurHash3's finalizer)."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)
