"""The shapes and dtypes of the arrays of a tree."""

from collections.abc import Hashable

import jax

from flaxfit.tree._types import PyTree


def shapes_of(tree: PyTree) -> PyTree:
    """Replaces arrays by their shapes and dtypes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def structure_of(tree: PyTree) -> tuple[Hashable, ...]:
    """Returns a hashable key of a tree's structure and its leaves' shapes and dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    return (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
