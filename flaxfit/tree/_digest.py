"""The digest of an array: a checksum of its content that does not depend on its sharding."""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.tree._context_mesh import without_mesh
from flaxfit.tree._types import Array, ArrayLike

Source: TypeAlias = str | np.ndarray
"""A digest, or the memory to compute it from later."""

_MOST_ARRAYS, _MOST_BYTES = 256, 2**26
"""The maximum arrays and bytes per program, which may copy them; a larger array goes alone."""
_MOST_IN_FLIGHT = 2
"""The maximum unfinished programs: on a CPU, too many pending collectives abort the process."""


@without_mesh()
def digests(arrays: Mapping[str, ArrayLike]) -> dict[str, str]:
    """Returns 16 hexadecimal digits by name that change when any bit of an array changes.

    Every element is mixed with its position, and the results are summed modulo 2**32. Integer sums
    do not depend on the order, so the digest is the same for every sharding, mesh and number of
    processes, without a gather. It detects damage, not an adversary.

    Arrays of the same shape, dtype and sharding share a program; all results are read at the end.
    """
    words = {name: _words(array) for name, array in arrays.items()}
    found: list[tuple[Sequence[str], jax.Array]] = []
    for names in _chunks(words):
        # Bound the dispatched programs, but keep some in flight so that the devices do not idle.
        if len(found) >= _MOST_IN_FLIGHT:
            found[-_MOST_IN_FLIGHT][1].block_until_ready()
        found.append((names, _lanes([words[name] for name in names])))
    lanes = jax.device_get([each for _, each in found])
    by_name = {
        name: "".join(f"{int(lane):08x}" for lane in pair)
        for (names, _), pairs in zip(found, lanes, strict=True)
        for name, pair in zip(names, pairs, strict=True)
    }
    return {name: by_name[name] for name in arrays}


def digests_or_sources(arrays: Mapping[str, Array]) -> dict[str, Source]:
    """Returns digests of arrays, or their host memory for another thread to compute them later.

    A NumPy array must not change until then. An array on several devices is digested at once, as
    their programs must run in one order. So is one on an accelerator, where it is fast, and where
    the array may be donated.
    """
    views = {name: _view(array) for name, array in arrays.items()}
    memory: dict[str, Source] = {n: v for n, v in views.items() if isinstance(v, np.ndarray)}
    return memory | digests({name: view for name, view in views.items() if name not in memory})


def as_digests(sources: Mapping[str, Source]) -> dict[str, str]:
    """Computes the digests that `digests_or_sources` has left for later."""
    known = {name: source for name, source in sources.items() if isinstance(source, str)}
    return known | digests({n: source for n, source in sources.items() if n not in known})


def _view(array: Array) -> Array:
    """Returns a view that keeps the memory of an array alive, if that is a single CPU device's."""
    if isinstance(array, jax.Array) and array.is_fully_replicated and array.is_fully_addressable:
        array = array.addressable_data(0)
        if next(iter(array.devices())).platform == "cpu":
            return np.asarray(array)
    return array


def _words(array: ArrayLike) -> Array:
    """Returns the array to digest: one replica, or host memory as 32-bit words."""
    if isinstance(array, jax.Array):
        return array.addressable_data(0) if array.is_fully_replicated else array
    array = np.asarray(array)
    # Elements of 64 bits or more become 32-bit words: JAX would truncate them.
    return array.reshape(-1).view(np.uint32) if array.dtype.itemsize >= 8 else array


def _chunks(arrays: Mapping[str, Array]) -> Iterator[Sequence[str]]:
    """Yields the names of arrays that share a program, in the same order in all processes."""
    alike: dict[Hashable, list[str]] = {}
    for name, array in arrays.items():
        like = array.shape, array.dtype, getattr(array, "sharding", None)
        alike.setdefault(like, []).append(name)
    for names in alike.values():
        n = max(1, min(_MOST_ARRAYS, _MOST_BYTES // max(1, arrays[names[0]].nbytes)))
        for start in range(0, len(names), n):
            yield names[start : start + n]


@jax.jit
def _lanes(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns two 32-bit words for each of several arrays of the same shape."""
    return jax.vmap(_lanes_of_one)(jnp.stack(arrays))


def _lanes_of_one(array: jax.Array) -> jax.Array:
    words = _device_words(array)
    # The constant keeps a zero word at position zero from mixing to zero.
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
