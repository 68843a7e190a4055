"""Mixed precision: a model that computes in 16 bits, with parameters and results in 32."""

from typing import Any

import jax
import jax.numpy as jnp

from flaxfit.tree._types import ArrayLike, Function, PyTree

PRECISIONS = (None, "float32", "bfloat16", "float16")


def in_precision(apply: Function, precision: str | None) -> Function:
    """An `apply` that casts parameters and inputs down to a precision, and what it gives up again.

    The other collections, such as BatchNorm's statistics, stay as they are.

    >>> double = in_precision(lambda v, x: v["params"] * x, "bfloat16")
    >>> double({"params": jnp.float32(2)}, jnp.float32(1.001))
    Array(2., dtype=float32)
    """
    if precision in (None, "float32"):
        return apply
    low = jnp.dtype(precision)

    def down(x: ArrayLike) -> Any:
        is_float = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(low) if is_float and x.dtype.itemsize > 2 else x

    def up(x: ArrayLike) -> Any:
        return x.astype(jnp.float32) if getattr(x, "dtype", None) == low else x

    def apply_low(variables: PyTree, *inputs: PyTree, **options: Any) -> Any:
        variables = {**variables, "params": jax.tree.map(down, variables["params"])}
        inputs, options = jax.tree.map(down, (inputs, options))
        return jax.tree.map(up, apply(variables, *inputs, **options))

    return apply_low


def in_float32(tree: PyTree) -> Any:
    """A tree whose floating-point arrays of less than 32 bits became float32.

    Losses and metrics are computed in it, whatever a module computes in.

    >>> in_float32((jnp.ones((), "bfloat16"), jnp.int8(1)))
    (Array(1., dtype=float32), Array(1, dtype=int8))
    """

    def up(x: ArrayLike) -> Any:
        dtype = getattr(x, "dtype", None)
        is_narrow = dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
        return x.astype(jnp.float32) if is_narrow else x

    return jax.tree.map(up, tree)


def like(new: PyTree, old: PyTree) -> PyTree:
    """The leaves of `new` in the dtypes of `old`: the types of a state never change."""
    return jax.tree.map(lambda a, b: a if a.dtype == b.dtype else a.astype(b.dtype), new, old)


def check_precision(owner: str, precision: str | None) -> None:
    """Checks that a precision is one of those that there are."""
    if precision not in PRECISIONS:
        raise ValueError(
            f"{owner} cannot compute in precision {precision!r}: choose one of {PRECISIONS}."
        )
