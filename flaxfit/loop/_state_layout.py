"""StateLayout: converts a state to the flat list of arrays that compiled programs take."""

from collections.abc import Sequence
from typing import Any

import jax

from flaxfit.tree import PyTree, flat, is_key


class StateLayout:
    """Converts states of one structure to lists of arrays, and back.

    A compiled call dispatches faster with a flat list than with a tree, and with raw key data than
    with typed random keys.

    >>> layout = StateLayout({"key": jax.random.key(0), "w": jax.numpy.ones(2)})
    >>> [x.shape for x in layout.flatten({"key": jax.random.key(0), "w": jax.numpy.ones(2)})]
    [(2,), (2,)]

    Args:
      state: a state of arrays with that structure.
    """

    def __init__(self, state: PyTree):
        leaves, self._structure = jax.tree.flatten(state)
        self._key_impls = {
            i: jax.random.key_impl(leaf) for i, leaf in enumerate(leaves) if is_key(leaf)
        }

    def flatten(self, state: PyTree) -> list[Any]:
        """Returns the arrays of a state, with key data for random keys."""
        leaves = jax.tree.leaves(state)
        for i in self._key_impls:
            leaves[i] = jax.random.key_data(leaves[i])
        return leaves

    def unflatten(self, leaves: Sequence[Any]) -> PyTree:
        """Returns the state of flat arrays."""
        leaves = list(leaves)
        for i, impl in self._key_impls.items():
            leaves[i] = jax.random.wrap_key_data(leaves[i], impl=impl)
        return self._structure.unflatten(leaves)

    def restructured(self, state: PyTree) -> Any:
        """Converts a state to this structure if its paths agree; else returns it unchanged.

        A state restored without a template holds plain dicts, whose order may differ. It keeps its
        own axis names.
        """
        if jax.tree.structure(state) == self._structure:
            return state
        paths = [*flat(self._structure.unflatten(range(self._structure.num_leaves)))]
        given = flat(state)
        if given.keys() != {*paths}:
            return state
        same = self._structure.unflatten([given[path] for path in paths])
        return same if state.axes is None else same.replace(axes=state.axes)
