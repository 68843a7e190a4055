"""Derives the logical axes of any optimizer's state from the parameters' axes."""

from collections.abc import Mapping
from itertools import combinations

import jax
import numpy as np
from flax.core import FrozenDict
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath

from flaxfit.state._logical_axes import Axes, unnamed
from flaxfit.tree import OptState, Params, PyTree, path_of, sections

Shape = tuple[int, ...]
Names = tuple[str | tuple[str, ...] | None, ...]


def with_optimizer(axes: Axes | None, params: Params, opt_state: OptState) -> Axes | None:
    """Replaces the axes of the optimizer's state by axes for this optimizer."""
    if axes is None:
        return None
    specs = specs_by_parameter({"opt_state": opt_state}, {"params": params}, axes)
    return FrozenDict({**(without_optimizer(axes) or {}), **specs})


def without_optimizer(axes: Axes | None) -> Axes | None:
    """Returns the axes of the parameters and the model state alone."""
    kept = {p: spec for p, spec in (axes or {}).items() if p.split("/")[0] != "opt_state"}
    return FrozenDict(kept) or None


def specs_by_parameter(
    state: PyTree, params: Params, specs: Mapping[str, PartitionSpec]
) -> dict[str, PartitionSpec]:
    """Returns a spec for each array of an optimizer's state, by path.

    A state mirrors all or some parameters below its own names and indices. An array belongs to the
    parameter whose path its own path contains: the longest match, then the last. This also holds
    for nested states and masked parts.

    The outer keys of `{"opt_state": ...}` and `{"params": ...}` are not part of the paths that are
    compared. Arrays of a parameter without a spec have none.
    """
    parameters = {p[1:]: (path_of(p), x) for p, x in jax.tree_util.tree_leaves_with_path(params)}
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        part = next((part for part in sections(path) if part in parameters), None)
        if part is None:
            found[path_of(path)] = unnamed(leaf)
            continue
        name, parameter = parameters[part]
        if name in specs:
            found[path_of(path)] = _derived(path, np.shape(leaf), np.shape(parameter), specs[name])
    return found


def _derived(path: KeyPath, shape: Shape, whole: Shape, spec: PartitionSpec) -> PartitionSpec:
    """Returns the spec of an array that an optimizer keeps for a parameter of shape `whole`."""
    names = tuple(spec) + (None,) * (len(whole) - len(spec))
    more = len(shape) - len(whole)
    if more >= 0 and shape[more:] == whole:  # Like the parameter, or a stack of them.
        return PartitionSpec(*(None,) * more, *names)
    if more == 0 and all(n in (1, size) for n, size in zip(shape, whole, strict=True)):
        # A mean that kept its dimensions, or a placeholder.
        sizes = zip(names, shape, whole, strict=True)
        return PartitionSpec(*(name if n == size else None for name, n, size in sizes))
    options = {
        tuple(names[i] if whole[i] > 1 else None for i in kept)
        for kept in combinations(range(len(whole)), len(shape))
        if tuple(whole[i] for i in kept) == shape
    }
    if len(options) > 1:
        options = _factor(path, whole, names) & options
    return PartitionSpec(*(options.pop() if len(options) == 1 else (None,) * len(shape)))


def _factor(path: KeyPath, whole: Shape, names: Names) -> set[Names]:
    """Names Adafactor's factors: `v_row` lacks the largest dimension, `v_col` the next.

    This is Optax's own call of `argsort`, so that ties between dimensions break the same way.
    """
    words = path_of(path).split("/")
    ordered = np.argsort(whole)
    dropped = {"v_row": ordered[-1], "v_col": ordered[-2]}
    names = tuple(name if size > 1 else None for name, size in zip(names, whole, strict=True))
    return {
        (*names[:axis], *names[axis + 1 :]) for factor, axis in dropped.items() if factor in words
    }
