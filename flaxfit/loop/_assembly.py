"""Assembler: stacks and splits batches over the devices, and remembers how by their shapes."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.loop._padding import Portion
from flaxfit.tree import Array, PyTree


class Loaded(NamedTuple):
    """One or several batches as the compiled update takes them, split over the devices."""

    portion: Portion
    """The first of them, before it was split."""
    arrays: list[Array]
    """Their leaves, stacked if there are several: a list crosses the call faster than a tree."""
    n_steps: int
    n_examples: int
    """The number of examples in all, without padding."""

    @property
    def n_bytes(self) -> int:
        """The bytes that they take on each device."""
        return sum(x.nbytes for x in self.arrays) // len(self.portion.strategy.devices)


class _Known(NamedTuple):
    """How items of the same shapes become batches, if these hold the very arrays of the items."""

    portion: Portion
    """That of the first of them."""
    weights: list[Array]
    """The weights of 1 on the devices, which come last, if batches have them."""
    n_examples: int


class Assembler:
    """Assembles batches from fetched items.

    Items of arrays of known structure, shapes and dtypes are neither normalized nor padded
    again, which would take as long as dispatching a small step.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}

    def __call__(self, items: Sequence[PyTree], portion: Callable[[PyTree], Portion]) -> Loaded:
        """Returns the batches of items; only the first if their programs differ.

        `portion` brings one item to a size that can be split.
        """
        n, item = len(items), items[0]
        key, leaves = _key_of(item) if n == 1 else _key_of_several(items)
        known = self._known.get(key)
        if known is None:
            first = portion(item)
            if key is None or not _takes_arrays(item, first):
                return _loaded([first, *map(portion, items[1:])])
            known = self._known[key] = _known_by(first, n)
        split, n_stacked = known.portion.strategy.split, n if n > 1 else 0
        leaves = leaves if n == 1 else [_stacked(each) for each in leaves]
        arrays = [split(leaf, n_stacked) for leaf in leaves]
        return Loaded(known.portion, arrays + known.weights, n, known.n_examples)


def _known_by(portion: Portion, n: int) -> _Known:
    """How `n` items become batches that are all like one whose arrays are those of its item."""
    weights, given = [], portion.batch.weights
    if given is not None:  # The weights of 1 are the same in each step: they go there once.
        given = jnp.asarray(given if n == 1 else np.stack([given] * n))
        weights = [portion.strategy.split(given, n if n > 1 else 0)]
    return _Known(portion, weights, n * portion.n_examples)


def _loaded(portions: Sequence[Portion]) -> Loaded:
    """Splits a batch, or stacks and splits several; only the first if their programs differ."""
    if any(each.signature != portions[0].signature for each in portions):
        portions = portions[:1]
    portion, n = portions[0], len(portions)
    split, leaves = portion.strategy.split, [jax.tree.leaves(each.batch) for each in portions]
    if n == 1:
        return Loaded(portion, split(leaves[0]), 1, portion.n_examples)
    stacked = [_stacked(each) for each in zip(*leaves, strict=True)]
    n_examples = sum(each.n_examples for each in portions)
    return Loaded(portion, split(stacked, n), n, n_examples)


def _key_of(item: PyTree) -> tuple[Hashable, list[PyTree]]:
    """Returns the structure, shapes and dtypes of arrays, and these; None for other items."""
    if type(item) is np.ndarray:
        return (item.shape, item.dtype), [item]
    try:
        leaves, structure = jax.tree.flatten(item)
    except ValueError:  # Names of inputs that cannot be sorted.
        return None, []
    key = [structure]
    for leaf in leaves:
        if type(leaf) is not np.ndarray and not isinstance(leaf, jax.Array):
            return None, []
        key += leaf.shape, leaf.dtype
    return tuple(key), leaves


def _key_of_several(items: Sequence[PyTree]) -> tuple[Hashable, list[PyTree]]:
    """As `_key_of`, with the arrays of all items together; None if they are not alike."""
    keys, leaves = zip(*map(_key_of, items), strict=True)
    if keys[0] is None or keys.count(keys[0]) < len(keys):
        return None, []
    return (len(items), keys[0]), [*zip(*leaves, strict=True)]


def _stacked(arrays: Sequence[Array]) -> Array:
    """As `np.stack`, which takes twice as long for small arrays; on the devices that hold them."""
    places = {getattr(array, "sharding", None) for array in arrays}
    if len(places) == 1 and None not in places:
        return _stack(arrays)
    if not arrays[0].shape:
        return np.stack(arrays)
    return np.concatenate(arrays).reshape(len(arrays), *arrays[0].shape)


_stack = jax.jit(jnp.stack)


def _takes_arrays(item: PyTree, portion: Portion) -> bool:
    """Whether a batch holds the very arrays of its item, in order, and no weights of the user's."""
    if portion.is_weighted and not portion.data:
        return False
    given = jax.tree.leaves(item)
    taken = jax.tree.leaves(portion.batch._replace(weights=None))
    is_same = len(given) == len(taken) and all(a is b for a, b in zip(given, taken, strict=True))
    # It is unknown to which of two places an array went that stands in both.
    return is_same and len({id(each) for each in given}) == len(given)
