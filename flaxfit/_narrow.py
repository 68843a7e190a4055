"""Host arrays in the width that JAX computes in: 64 bits become 32."""

from typing import Any

import jax
import numpy as np

_KINDS = "biufcV"


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array (of NumPy, JAX, pandas, torch, ...), as opposed to a scalar."""
    return hasattr(leaf, "__array__") and not isinstance(leaf, np.generic)


def narrow_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype that JAX gives to arrays of a NumPy dtype.

    Raises:
      TypeError: the dtype is not one of numbers.
    """
    if dtype.itemsize < 8 and dtype.kind in "biuf" and dtype.isnative:
        return dtype  # Each array of each batch comes by here.
    if dtype.kind not in _KINDS:
        raise TypeError(f"Cannot train on an array of dtype {dtype}: encode it as numbers first.")
    return jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))


def narrow(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in a narrower dtype; the array itself where it has that dtype already.

    Raises:
      ValueError: an integer does not fit.
    """
    if array.dtype == dtype:
        return array
    if dtype.kind in "iu" and array.size:
        low, high, bounds = array.min(), array.max(), np.iinfo(dtype)
        if low < bounds.min or high > bounds.max:
            raise ValueError(
                f"An array of {array.dtype} holds values from {low} to {high}, which do not fit "
                f"{dtype}, the width JAX computes in: rescale or hash them."
            )
    return array.astype(dtype)
