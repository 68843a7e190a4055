"""Logical axes: the names of the dimensions of arrays, by the paths of a state."""

from collections.abc import Iterator, Mapping

import jax
import numpy as np
from flax.core import FrozenDict, meta
from jax.sharding import PartitionSpec

from flaxfit.tree import ArrayLike, PyTree, flat, path_of

Axes = FrozenDict[str, PartitionSpec]
"""The names of the arrays of a state by path, as in "params/Dense_0/kernel". It is hashable."""


_TRANSIENT = ("intermediates", "losses")
_SUFFIX = "_axes"


def take_apart(variables: Mapping[str, PyTree]) -> tuple[dict[str, PyTree], Axes | None]:
    """Splits variables into the fields `params` and `model_state`, and axes (None: no names).

    Names are in boxes (`nn.with_logical_partitioning`, `nn.with_partitioning`) or in their own
    collections (`params_axes`, as `flax.linen.partitioning` makes them).
    """
    arrays = {name: tree for name, tree in variables.items() if name not in _TRANSIENT}
    named = {
        name: arrays.pop(name)
        for name in variables
        if name.endswith(_SUFFIX) and name in arrays and _holds_names(arrays[name])
    }
    fields = {"params": arrays.pop("params", {}), "model_state": arrays}
    found = dict(_of_boxes(fields))
    for name, tree in named.items():
        collection = name.removesuffix(_SUFFIX)
        if collection not in _TRANSIENT:
            place = collection if collection == "params" else f"model_state/{collection}"
            found.update(_of_collection(place, tree))
    fields = meta.unbox(fields)
    return fields, FrozenDict(_checked(found, flat(fields))) or None


def check_has_params(variables: PyTree) -> None:
    """Checks that variables are `{"params": ..., ...}`, and not the parameters themselves."""
    is_mapping = isinstance(variables, Mapping)
    if not is_mapping or "params" not in variables:
        received = f"the keys {list(variables)}" if is_mapping else type(variables).__name__
        raise ValueError(
            f"Cannot make a state without a collection 'params', got {received}: pass what the "
            "model's init returned, or {'params': params}."
        )


def unnamed(array: ArrayLike) -> PartitionSpec:
    """Returns the spec of an array without names."""
    return PartitionSpec(*(None,) * np.ndim(array))


def below(field: str, tree: PyTree, axes: Axes | None) -> PyTree:
    """Returns the specs of a state's field in the same tree, or None if it has no names."""
    if not any(path.split("/")[0] == field for path in axes or ()):
        return None
    at = jax.tree_util.tree_map_with_path
    return at(lambda path, _: (axes or {}).get(path_of(path)), {field: tree})[field]


def as_logical_axes(state: PyTree) -> PyTree:
    """Replaces every array of a state by its spec; only model state may lack names."""
    axes: Mapping[str, PartitionSpec] = state.axes or {}
    wrong = [
        path
        for path, leaf in flat(state).items()
        if len(axes.get(path, ())) != np.ndim(leaf)
        and not (path.startswith("model_state") and path not in axes)
    ]
    if parameters := [path for path in wrong if path.split("/")[0] == "params"]:
        raise ValueError(
            "Cannot name the dimensions of every array. Missing axis names for parameters: "
            f"{', '.join(parameters)}. Make them with nn.with_logical_partitioning(initializer, "
            "names), or return a collection `params_axes` from init."
        )
    if wrong:
        raise ValueError(
            "Cannot name the dimensions of every array: the state does not have the arrays that "
            f"its axes were made for, at {', '.join(wrong)}. After a change of the optimizer, use "
            "state.replace_optimizer(optimizer)."
        )
    return jax.tree.map_with_path(lambda path, leaf: axes.get(path_of(path), unnamed(leaf)), state)


def _of_boxes(fields: PyTree) -> Iterator[tuple[str, PartitionSpec]]:
    leaves = jax.tree_util.tree_leaves_with_path(fields, is_leaf=meta.is_axis_metadata)
    for path, box in leaves:
        if meta.is_axis_metadata(box) and hasattr(box, "get_partition_spec"):
            yield path_of(path), box.get_partition_spec()


def _of_collection(place: str, tree: PyTree) -> Iterator[tuple[str, PartitionSpec]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_names):
        name = "/".join((place, *([path_of(path)] if path else [])))
        yield name.removesuffix(_SUFFIX), PartitionSpec(*getattr(leaf, "names", leaf))


def _holds_names(tree: PyTree) -> bool:
    """Returns whether a collection holds only names; `..._axes` may also hold arrays."""
    return all(map(_is_names, jax.tree.leaves(tree, is_leaf=_is_names)))


def _is_names(x: PyTree) -> bool:
    if isinstance(x, PartitionSpec):
        return True
    if hasattr(x, "names"):
        return not jax.tree.leaves(x)  # Else it is a box with an array in it.
    # Not a tuple of arrays, and not a named tuple.
    return type(x) is tuple and all(name is None or isinstance(name, str) for name in x)


def _checked(found: Mapping[str, PartitionSpec], arrays: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Checks names against arrays, and pads them with None to the rank."""
    wrong = [f"{path} has names but no array" for path in found if path not in arrays]
    wrong += [
        f"{path} has {len(found[path])} names, {tuple(found[path])}, for the shape {array.shape}"
        for path, array in arrays.items()
        if path in found and len(found[path]) > np.ndim(array)
    ]
    if wrong:
        raise ValueError(f"The axis names do not fit the variables: {'; '.join(wrong)}.")
    return {
        path: PartitionSpec(*names, *unnamed(arrays[path])[len(names) :])
        for path, names in found.items()
    }
