"""Host arrays in the width that JAX computes in: 64 bits become 32, less than a byte becomes 8."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.tree._types import Array, ArrayLike, Function, PyTree

_KINDS = "biufcV"
# JAX promotes no integers of less than a byte, so that few layers and losses take them.
_WIDENED = {
    np.dtype(getattr(jnp, name)): np.dtype(name[:-1] + "8")
    for name in ("int2", "int4", "uint2", "uint4")
}


def is_array(leaf: ArrayLike) -> bool:
    """Returns whether a leaf is an array (of NumPy, JAX, pandas, torch, ...), not a scalar."""
    return hasattr(leaf, "__array__") and not isinstance(leaf, np.generic)


def is_key(leaf: ArrayLike) -> bool:
    """Returns whether a leaf is a typed random key, or describes one."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def tangents(direction_of: Function, arrays: list[Array], *others: list[Array]) -> list[ArrayLike]:
    """Returns the directions of arrays as `jax.jvp` takes them: only floats have directions."""

    def tangent(x: Array, *rest: Array) -> ArrayLike:
        is_float = jnp.issubdtype(x.dtype, jnp.inexact)
        return direction_of(x, *rest) if is_float else np.zeros(x.shape, jax.dtypes.float0)

    return [*map(tangent, arrays, *others)]


def is_named(part: PyTree) -> bool:
    """Returns whether a part of the data is a NamedTuple: one value with fields."""
    return isinstance(part, tuple) and hasattr(part, "_fields")


def is_node(part: PyTree) -> bool:
    """Returns whether JAX flattens an object to arrays, such as a registered dataclass."""
    if isinstance(part, Iterable):
        return False
    leaves = jax.tree.leaves(part)
    return bool(leaves) and leaves[0] is not part and all(map(is_array, leaves))


def is_sparse(leaf: ArrayLike) -> bool:
    """Returns whether a leaf is a sparse or ragged array, of SciPy, JAX, TensorFlow or torch."""
    return _made_dense_by(leaf) is not None


def check_dense(leaf: ArrayLike) -> None:
    """Raises a TypeError for a sparse or ragged array, with the call that makes it dense."""
    call = _made_dense_by(leaf)
    if call is None:
        return
    if call in _PADDING:
        advice = (
            f"a ragged array: pad its rows to one length, {call}, with the weight 0 for what was "
            "added if that is not to count"
        )
    else:
        advice = f"a sparse array: make it dense, {call}"
    raise TypeError(
        f"Cannot train on a {type(leaf).__name__}, {advice}. If that does not fit in memory, pass "
        "batches and convert each when it is needed."
    )


_PADDING = ("x.to_tensor()", "torch.nested.to_padded_tensor(x, 0.0)")


def _made_dense_by(leaf: ArrayLike) -> str | None:
    """Returns the call that makes a sparse or ragged array dense; None for other arrays."""
    if is_array(leaf):  # A frame may have columns of these names.
        if getattr(leaf, "is_nested", False) is True:
            return _PADDING[1]
        is_torch = any(getattr(leaf, n, False) is True for n in ("is_sparse", "is_sparse_csr"))
        return "x.to_dense()" if is_torch else None
    if type(leaf).__name__.startswith("SparseTensor"):
        return "tf.sparse.to_dense(x)"
    if type(leaf).__name__.startswith("RaggedTensor"):
        return _PADDING[0]
    found = (name for name in ("toarray", "todense", "to_tensor") if hasattr(leaf, name))
    return next((f"x.{name}()" for name in found), None)


def to_numpy(leaf: ArrayLike) -> np.ndarray:
    """Converts to NumPy; the columns of a table get a common dtype."""
    if np.ma.is_masked(leaf):
        raise TypeError(
            "Cannot train on a masked array, whose masked values would count: fill them, "
            "x.filled(0), or leave their rows out. Only the targets of a single output may be "
            "masked, and have the weight 0 there; for several, give weights by output."
        )
    try:
        array = np.asarray(leaf)
    except (TypeError, RuntimeError):  # A torch tensor in bfloat16, or with a gradient.
        if not hasattr(leaf, "detach"):
            raise
        return of_torch(leaf)
    if array.dtype != object or np.ndim(getattr(leaf, "dtypes", None)) != 1:
        return array
    try:
        common = np.result_type(*(getattr(t, "numpy_dtype", t) for t in leaf.dtypes))
        return array.astype(common)
    except (TypeError, ValueError):
        raise TypeError(
            f"Cannot train on a {type(leaf).__name__} with columns that are not numbers: "
            f"{_not_numbers(leaf, array)}. Encode them, such as with pandas.get_dummies, fill what "
            "is missing, or leave them out."
        ) from None


def of_torch(tensor: ArrayLike) -> np.ndarray:
    """Converts a tensor to NumPy, without a copy if it is on the host."""
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # torch converts none to NumPy: reinterpret the bits.
        return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.numpy()


def _not_numbers(table: ArrayLike, array: np.ndarray) -> str:
    """Lists the columns of a table that are text or dates, or have missing values."""
    found = []
    for name, dtype, column in zip(table.columns, table.dtypes, array.T, strict=True):
        try:
            column.astype(float)
            is_number = getattr(dtype, "kind", "O") in "biuf"
        except (TypeError, ValueError):
            is_number = False
        if not is_number:
            found.append(f"{name!r} ({dtype})")
    return ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")


def narrow_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype that JAX gives to arrays of a NumPy dtype of numbers."""
    if dtype.itemsize < 8 and dtype.kind in "biuf" and dtype.isnative:
        return dtype  # Fast path: this runs for each array of each batch.
    if dtype.kind not in _KINDS:
        advice = ""
        if dtype.kind == "O":
            advice = " Pad rows of different lengths to one, and number categories."
        elif dtype.kind in "US":
            advice = " For labels: np.unique(labels, return_inverse=True)[1]."
        raise TypeError(
            f"Cannot train on an array of dtype {dtype}: encode it as numbers first.{advice}"
        )
    return _WIDENED.get(dtype) or jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))


def widened(array: jax.Array) -> jax.Array:
    """Converts integers of less than a byte to whole bytes."""
    dtype = _WIDENED.get(array.dtype)
    return array if dtype is None else array.astype(dtype)


def narrow(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Converts an array to a narrower dtype, without a copy if it has that dtype already.

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
