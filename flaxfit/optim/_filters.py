"""Filters: assign parameters to groups."""

import re
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import jax

from flaxfit.optim._freeze import is_masked, listing
from flaxfit.tree import ArrayLike, Params, PyTree, is_nnx_filter, path_of


@runtime_checkable
class Traversal(Protocol):
    """Selects parts of a tree, as the traversals of `flax.traverse_util` do."""

    def iterate(self, inputs: PyTree) -> PyTree:
        """Returns the selected parts."""

    def update(self, fn: Callable[[PyTree], PyTree], inputs: PyTree) -> PyTree:
        """Applies a function to the selected parts."""


Filter = str | re.Pattern[str] | Traversal | Callable[[str, ArrayLike], bool]
"""A pattern of whole paths, a traversal, or a predicate of a path and a parameter."""


def group_name(position: int, filter: object) -> str:
    """Returns the name of a group: its pattern, or its position where it has none."""
    if isinstance(filter, str | re.Pattern):
        try:
            return re.compile(filter).pattern
        except re.error as error:
            raise ValueError(
                f"Group {position} has no valid pattern: {filter!r}: {error}."
            ) from None
    if is_nnx_filter(filter):
        return getattr(filter, "__name__", None) or repr(filter)
    if not (isinstance(filter, Traversal) or callable(filter)):
        raise TypeError(
            "A group is chosen by a pattern of paths, an NNX filter, a function (path, value) -> "
            f"bool, or an object with iterate and update, got {filter!r} for group {position}."
        )
    return str(position)


def assign(filters: Sequence[Filter], names: Sequence[str], params: Params) -> PyTree:
    """Labels each parameter with the index of its group, or with `len(filters)` if it has none.

    A dict whose parameters are all in one group has one label.

    >>> assign(["a/.*", lambda path, x: x > 2], ["a/.*", "1"], {"a": {"b": 1}, "c": 2, "d": 3})
    {'a': 0, 'c': 2, 'd': 1}
    """
    paths = [path for path, _ in _parameters(params)]
    chosen = [_select(filter, params) for filter in filters]
    for name, filter, selected in zip(names, filters, chosen, strict=True):
        # Optax finds parameters in a state by initializing a tree without any.
        if paths and not any(selected) and not _may_be_frozen(filter, params):
            raise ValueError(
                f"Group {name!r} matches no parameter (patterns match whole paths: use "
                f"'encoder/.*' for all of encoder). The parameters are:{listing(paths)}"
            )
    groups = [
        [i for i, selected in enumerate(chosen) if selected[leaf]] for leaf in range(len(paths))
    ]
    twice = [
        f"{path} (groups {', '.join(repr(names[i]) for i in of_leaf)})"
        for path, of_leaf in zip(paths, groups, strict=True)
        if len(of_leaf) > 1
    ]
    if twice:
        raise ValueError(f"Multiple optimizers match the same parameters:{listing(twice)}")
    labels = [of_leaf[0] if of_leaf else len(filters) for of_leaf in groups]
    return _collapsed(jax.tree.unflatten(jax.tree.structure(params), labels))


_CHOSEN = object()


def _select(filter: Filter, params: Params) -> list[bool]:
    if isinstance(filter, str | re.Pattern):
        return [re.fullmatch(filter, path) is not None for path, _ in _parameters(params)]
    if is_nnx_filter(filter):
        raise TypeError(
            f"{filter!r} is a filter of NNX variables, which only a task with an NNX module can "
            "resolve: give the MultiOptimizer to TrainTask or Model, and not within another "
            "transformation. Or choose the group by a pattern of paths."
        )
    if isinstance(filter, Traversal):
        marked = filter.update(lambda part: jax.tree.map(lambda _: _CHOSEN, part), params)
        return [leaf is _CHOSEN for leaf in jax.tree.leaves(marked)]
    try:
        return [bool(filter(path, leaf)) for path, leaf in _parameters(params)]
    except jax.errors.TracerBoolConversionError as error:
        raise TypeError(
            "A filter of a group may inspect the path, the shape and the dtype of a parameter. "
            "Its values are unknown while a step is compiled."
        ) from error


def _may_be_frozen(filter: Filter, params: Params) -> bool:
    """Returns whether a filter that selects nothing may refer to frozen parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_masked)
    masked = [path_of(path) for path, node in leaves if is_masked(node)]
    if not isinstance(filter, str | re.Pattern):
        return bool(masked)
    return any(re.fullmatch(filter, path) for path in masked)


def _collapsed(labels: PyTree) -> PyTree:
    """Replaces a dict with only one label by the label, so that fewer nodes are masked."""
    if not isinstance(labels, dict):
        return labels
    parts = {name: _collapsed(part) for name, part in labels.items()}
    found = list(parts.values())
    is_one = all(isinstance(part, int) and part == found[0] for part in found)
    return found[0] if found and is_one else parts


def _parameters(params: Params) -> list[tuple[str, ArrayLike]]:
    """Returns paths and leaves; a boxed value (NNX variable, Linen metadata) has the box's path."""
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        is_boxed = path and path[-1] == jax.tree_util.GetAttrKey("value")
        leaves.append((path_of(path[:-1] if is_boxed else path), leaf))
    return leaves
