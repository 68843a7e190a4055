"""Mixed precision: computation in 16 bits, with parameters and results in 32 bits."""

import jax
import jax.numpy as jnp

from flaxfit.tree import ArrayLike, Function, PyTree

PRECISIONS = (None, "float32", "bfloat16", "float16")


def in_precision(apply: Function, precision: str | None) -> Function:
    """Wraps `apply` to cast parameters and inputs to a precision, and results back to float32.

    The other collections, such as BatchNorm's statistics, are not cast.
    """
    if precision in (None, "float32"):
        return apply
    low = jnp.dtype(precision)

    def down(x: ArrayLike) -> ArrayLike:
        is_float = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(low) if is_float and x.dtype.itemsize > 2 else x

    def up(x: ArrayLike) -> ArrayLike:
        return x.astype(jnp.float32) if getattr(x, "dtype", None) == low else x

    def apply_low(variables: PyTree, *inputs: PyTree, **options: PyTree) -> PyTree:
        variables = {**variables, "params": jax.tree.map(down, variables["params"])}
        inputs, options = jax.tree.map(down, (inputs, options))
        return jax.tree.map(up, apply(variables, *inputs, **options))

    return apply_low


def in_float32(tree: PyTree) -> PyTree:
    """Casts narrower floats to float32, in which losses and metrics are computed."""

    def up(x: ArrayLike) -> ArrayLike:
        dtype = getattr(x, "dtype", None)
        is_narrow = dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
        return x.astype(jnp.float32) if is_narrow else x

    return jax.tree.map(up, tree)
