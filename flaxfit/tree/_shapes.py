"""The shapes and dtypes of the arrays of a tree."""

from collections.abc import Hashable

import jax

from flaxfit.tree._types import PyTree


def shapes_of(tree: PyTree) -> PyTree:
    """The tree with the shapes and dtypes of its arrays in their places."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def structure_of(tree: PyTree) -> tuple[Hashable, ...]:
    """The structure of a tree with the shapes and dtypes of its leaves, as a key."""
    leaves, structure = jax.tree.flatten(tree)
    return (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
