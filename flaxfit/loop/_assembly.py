"""Assembler: stacks batches and splits them over the devices, by a plan cached by shapes."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.loop._padding import PreparedBatch
from flaxfit.tree import Array, PyTree


class Loaded(NamedTuple):
    """The arguments of one dispatch: one batch or several stacked ones, split over the devices."""

    prepared: PreparedBatch
    """The first batch, before it was split."""
    arrays: list[Array]
    """The leaves of the batches. A flat list crosses the call of a program faster than a tree."""
    n_steps: int
    n_examples: int
    """The examples of all batches, without padding."""

    @property
    def n_bytes(self) -> int:
        """The size of the arrays on each device."""
        return sum(x.nbytes for x in self.arrays) // len(self.prepared.strategy.devices)


class _Known(NamedTuple):
    """The plan for items of one signature whose arrays become those of the batch unchanged."""

    prepared: PreparedBatch
    """The first prepared batch of this signature."""
    weights: list[Array]
    """The weights of 1 on the devices, appended to the leaves; empty if the batch has none."""
    n_examples: int


class Assembler:
    """Assembles batches from fetched items.

    Items of a known signature (structure, shapes, dtypes) skip normalization and padding, which
    would take as long as dispatching a small step.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}

    def __call__(
        self, items: Sequence[PyTree], prepare: Callable[[PyTree], PreparedBatch]
    ) -> Loaded:
        """Loads the batches of items; only the first if they need different programs.

        `prepare` pads or cuts one item to a size that can be split.
        """
        n, item = len(items), items[0]
        if n == 1:
            return self.one(item, prepare)
        key, leaves = _key_of_several(items)
        known = self._known.get(key)
        if known is None:
            first = prepare(item)
            if key is None or not _takes_arrays(item, first):
                return _loaded([first, *map(prepare, items[1:])])
            known = self._known[key] = _known_by(first, n)
        split = known.prepared.strategy.split
        arrays = [split(_stacked(each), n) for each in leaves]
        return Loaded(known.prepared, arrays + known.weights, n, known.n_examples)

    def one(self, item: PyTree, prepare: Callable[[PyTree], PreparedBatch]) -> Loaded:
        """Loads the batch of one item."""
        key, leaves = _key_of(item)
        known = self._known.get(key)
        if known is None:
            prepared = prepare(item)
            if key is None or not _takes_arrays(item, prepared):
                return _loaded([prepared])
            known = self._known[key] = _known_by(prepared, 1)
        split = known.prepared.strategy.split
        arrays = [split(leaf) for leaf in leaves]  # Faster than all in one call.
        return Loaded(known.prepared, arrays + known.weights, 1, known.n_examples)


def _known_by(prepared: PreparedBatch, n: int) -> _Known:
    """Returns the plan for `n` items of the signature of this one."""
    weights, given = [], prepared.batch.weights
    if given is not None:  # The weights of 1 are the same in each step: transferred once.
        given = jax.device_put(given if n == 1 else np.stack([given] * n))
        weights = [prepared.strategy.split(given, n if n > 1 else 0)]
    return _Known(prepared, weights, n * prepared.n_examples)


def _loaded(batches: Sequence[PreparedBatch]) -> Loaded:
    """Stacks and splits batches; only the first if they need different programs."""
    if any(each.signature != batches[0].signature for each in batches):
        batches = batches[:1]
    first, n = batches[0], len(batches)
    split, leaves = first.strategy.split, [jax.tree.leaves(each.batch) for each in batches]
    if n == 1:
        return Loaded(first, split(leaves[0]), 1, first.n_examples)
    stacked = [_stacked(each) for each in zip(*leaves, strict=True)]
    n_examples = sum(each.n_examples for each in batches)
    return Loaded(first, split(stacked, n), n, n_examples)


def _key_of(item: PyTree) -> tuple[Hashable, list[PyTree]]:
    """Returns the signature of an item of arrays, and its leaves; None for other items."""
    if type(item) is np.ndarray:
        return (item.shape, item.dtype), [item]
    try:
        leaves, structure = jax.tree.flatten(item)
    except ValueError:  # JAX sorts the keys of a dict; some cannot be compared.
        return None, []
    key = [structure]
    for leaf in leaves:
        if type(leaf) is not np.ndarray and not isinstance(leaf, jax.Array):
            return None, []
        key += leaf.shape, leaf.dtype
    return tuple(key), leaves


def _key_of_several(items: Sequence[PyTree]) -> tuple[Hashable, list[PyTree]]:
    """Like `_key_of` for several items, with leaves grouped; None if their signatures differ."""
    keys, leaves = zip(*map(_key_of, items), strict=True)
    if keys[0] is None or keys.count(keys[0]) < len(keys):
        return None, []
    return (len(items), keys[0]), [*zip(*leaves, strict=True)]


def _stacked(arrays: Sequence[Array]) -> Array:
    """Stacks arrays on their devices, or on the host (there, faster than `np.stack`)."""
    places = {getattr(array, "sharding", None) for array in arrays}
    if len(places) == 1 and None not in places:
        return _stack(arrays)
    if not arrays[0].shape:
        return np.stack(arrays)
    return np.concatenate(arrays).reshape(len(arrays), *arrays[0].shape)


_stack = jax.jit(jnp.stack)


def _takes_arrays(item: PyTree, prepared: PreparedBatch) -> bool:
    """Returns whether the batch's leaves are the item's arrays, in order, with no user weights."""
    if prepared.is_weighted and not prepared.data:
        return False
    given = jax.tree.leaves(item)
    taken = jax.tree.leaves(prepared.batch._replace(weights=None))
    is_same = len(given) == len(taken) and all(a is b for a, b in zip(given, taken, strict=True))
    # The plan maps leaves by identity: an array that occurs twice has no unique position.
    return is_same and len({id(each) for each in given}) == len(given)
