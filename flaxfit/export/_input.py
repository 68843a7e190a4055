"""as_input: what a caller gives an exported method, as an array of the dtype that it takes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
"""Each holds the numbers of those before it."""


def as_input(method: str, wanted: Any, value: Any) -> jax.Array:
    """An array, or nested lists of numbers, as an array of the wanted dtype.

    >>> as_input("logits", jax.ShapeDtypeStruct((1, 2), np.float32), [[0, 16]])
    Array([[ 0., 16.]], dtype=float32)

    Args:
      method: its name, for the messages.
      wanted: the dtype and shape that the method takes.
      value: what it was given.

    Raises:
      TypeError: numbers of that kind cannot be cast without loss.
      ValueError: a number does not fit the dtype; or a dimension is empty.
    """
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if _kind(array.dtype) > _kind(wanted.dtype):
        raise TypeError(
            f"{method!r} takes {wanted.dtype}, got {array.dtype}, which does not become it without "
            f"loss: pass x.astype({str(wanted.dtype)!r}) if that is meant."
        )
    if 0 in array.shape and 0 not in wanted.shape:
        raise ValueError(
            f"{method!r} takes dimensions of 1 or more, got the shape {array.shape}: there is "
            "nothing to compute."
        )
    cast = array.astype(wanted.dtype)
    are_whole = jnp.issubdtype(array.dtype, jnp.integer) and jnp.issubdtype(cast.dtype, jnp.integer)
    if are_whole and isinstance(array, np.ndarray) and not np.array_equal(cast, array):
        raise ValueError(
            f"{method!r} takes {wanted.dtype}, which does not hold numbers from {array.min()} to "
            f"{array.max()}."
        )
    return jnp.asarray(cast)


def _kind(dtype: Any) -> int:
    """The place of a dtype among the kinds of numbers; the last for what is none."""
    places = [place for place, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)]
    return places[0] if places else len(_KINDS)
