"""Converts trees to named arrays and descriptions, and back."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from flaxfit.tree import Array, ArrayLike, Json, PyTree, flat, path_of, put_like

Description = Mapping[str, Json]
"""The shape and dtype of a leaf in a file, and for a random key its implementation."""


def leaves_of(tree: PyTree) -> dict[str, ArrayLike]:
    """Returns the leaves of a tree by path, which must be unique; Python numbers as arrays."""
    kinds = jax.Array | np.ndarray | jax.ShapeDtypeStruct
    leaves = {p: x if isinstance(x, kinds) else np.asarray(x) for p, x in flat(tree).items()}
    if len(leaves) < len(jax.tree.leaves(tree)):
        paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        raise ValueError(f"Cannot name every array: these paths occur twice: {', '.join(twice)}.")
    return leaves


def describe(leaf: ArrayLike) -> dict[str, Json]:
    """Returns the shape and dtype of a leaf, as a file keeps them."""
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def descriptions(tree: PyTree) -> dict[str, Description]:
    """Returns the shapes and dtypes of the leaves of a tree by path."""
    return {name: describe(leaf) for name, leaf in leaves_of(tree).items()}


def key_description(key: jax.Array) -> dict[str, Json]:
    """Returns the facts needed to rebuild a typed random key from its words."""
    return {
        "random_bits": str(jax.random.key_impl(key)),
        "words": list(jax.random.key_data(key).shape),
    }


def unflatten(arrays: Mapping[str, Array], template: PyTree) -> PyTree:
    """Replaces the leaves of a template by the arrays with their paths."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _like(arrays[name], leaf) if (name := path_of(path)) in arrays else leaf,
        template,
    )


def nested(arrays: Mapping[str, Array]) -> dict[str, PyTree]:
    """Splits paths into nested dicts."""
    for path in arrays:
        ends = [at for at, letter in enumerate(path) if letter == "/"]
        if any(path[:end] in arrays for end in ends):
            raise ValueError(
                f"Cannot make nested dicts of the names of these arrays: {path} extends the name "
                "of another one. Pass a target."
            )
    return traverse_util.unflatten_dict(dict(arrays), sep="/")


def on_device(array: Array) -> Array:
    """Converts an array to JAX, unless JAX would truncate its 64 bits to 32."""
    if isinstance(array, jax.Array) or jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        return array
    return jnp.array(array)


def _like(array: Array, template: ArrayLike) -> ArrayLike:
    """Converts a restored array or key to the type of the leaf that it replaces.

    Without a sharding it becomes an uncommitted array that nothing else refers to.
    """
    if isinstance(template, jax.ShapeDtypeStruct | jax.Array):
        return put_like(array, template)
    return array if hasattr(template, "dtype") else array.item()
