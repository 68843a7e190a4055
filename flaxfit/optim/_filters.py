"""Filters: assign parameters to groups."""

import re
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import jax
import optax

from flaxfit.tree._paths import path_of
from flaxfit.tree._types import ArrayLike, Params, PyTree


@runtime_checkable
class Traversal(Protocol):
    """Selects parts of a tree, as the traversals of `flax.traverse_util` do."""

    def iterate(self, inputs: PyTree) -> PyTree:
        """The selected parts."""

    def update(self, fn: Callable[[PyTree], PyTree], inputs: PyTree) -> PyTree:
        """The tree with a function applied to the selected parts."""


Filter = str | re.Pattern[str] | Traversal | Callable[[str, ArrayLike], bool]
"""A pattern of the whole path, a traversal, or a function of the path and the parameter."""


def group_name(position: int, filter: object) -> str:
    """The name of a group: its pattern, or its position where the filter is not a pattern.

    Raises:
      TypeError: the filter is neither a pattern, nor a function, nor a traversal.
      ValueError: the pattern is not a regular expression.
    """
    if isinstance(filter, str | re.Pattern):
        try:
            return re.compile(filter).pattern
        except re.error as error:
            raise ValueError(
                f"Group {position} has no valid pattern: {filter!r}: {error}."
            ) from None
    if not (isinstance(filter, Traversal) or callable(filter)):
        raise TypeError(
            "A group is chosen by a pattern of paths, a function (path, value) -> bool, or an "
            f"object with iterate and update, got {filter!r} for group {position}."
        )
    return str(position)


def assign(filters: Sequence[Filter], names: Sequence[str], params: Params) -> PyTree:
    """The tree of the numbers of the groups; what no group has gets the next number.

    A part of the tree that is in one group as a whole is given as one number.

    >>> assign(["a/.*", lambda path, x: x > 2], ["a/.*", "1"], {"a": {"b": 1}, "c": 2, "d": 3})
    {'a': 0, 'c': 2, 'd': 1}

    Raises:
      ValueError: a group has no parameter, or two groups have the same one.
    """
    paths = [path for path, _ in _parameters(params)]
    chosen = [_select(filter, params) for filter in filters]
    for name, filter, selected in zip(names, filters, chosen, strict=True):
        # A tree without any parameter is fine: so optax looks where parameters are in a state.
        if paths and not any(selected) and not _is_frozen(filter, params):
            raise ValueError(
                f"Group {name!r} matches no parameter (patterns match whole paths, so that "
                f"'encoder/.*' is all of encoder). The parameters are:{_listing(paths)}"
            )
    numbers = [
        [number for number, selected in enumerate(chosen) if selected[i]] for i in range(len(paths))
    ]
    twice = [
        f"{path} (groups {', '.join(repr(names[number]) for number in of_leaf)})"
        for path, of_leaf in zip(paths, numbers, strict=True)
        if len(of_leaf) > 1
    ]
    if twice:
        raise ValueError(f"Multiple optimizers match the same parameters:{_listing(twice)}")
    rest = len(filters)
    labels = [of_leaf[0] if of_leaf else rest for of_leaf in numbers]
    return _collapsed(jax.tree.unflatten(jax.tree.structure(params), labels))


_CHOSEN = object()


def _select(filter: Filter, params: Params) -> list[bool]:
    """Whether each leaf is selected."""
    if isinstance(filter, str | re.Pattern):
        return [re.fullmatch(filter, path) is not None for path, _ in _parameters(params)]
    if isinstance(filter, Traversal):
        marked = filter.update(lambda part: jax.tree.map(lambda _: _CHOSEN, part), params)
        return [leaf is _CHOSEN for leaf in jax.tree.leaves(marked)]
    try:
        return [bool(filter(path, leaf)) for path, leaf in _parameters(params)]
    except jax.errors.TracerBoolConversionError as error:
        raise TypeError(
            "A filter of a group may look at the path, the shape and the dtype of a parameter. "
            "Its values are not known where a step is compiled."
        ) from error


def _is_frozen(filter: Filter, params: Params) -> bool:
    """Whether a filter may select only parameters that are masked, as frozen ones are."""
    if not isinstance(filter, str | re.Pattern):
        return bool(_masked(params))
    return any(re.fullmatch(filter, path) for path in _masked(params))


def _masked(params: Params) -> list[str]:
    """The paths of the masked nodes of a tree."""

    def is_masked(node: PyTree) -> bool:
        return isinstance(node, optax.MaskedNode)

    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_masked)
    return [path_of(path) for path, node in leaves if is_masked(node)]


def _collapsed(labels: PyTree) -> PyTree:
    """The tree with dicts of one and the same label as that label: fewer nodes to be masked."""
    if not isinstance(labels, dict):
        return labels
    parts = {name: _collapsed(part) for name, part in labels.items()}
    found = list(parts.values())
    is_one = all(isinstance(part, int) and part == found[0] for part in found)
    return found[0] if found and is_one else parts


def _parameters(params: Params) -> list[tuple[str, ArrayLike]]:
    """Paths and leaves. The value in a box is named as the box: an nnx variable, linen metadata."""
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        is_boxed = path and path[-1] == jax.tree_util.GetAttrKey("value")
        leaves.append((path_of(path[:-1] if is_boxed else path), leaf))
    return leaves


def _listing(paths: Sequence[str]) -> str:
    shown = [*paths[:50], *([f"... and {len(paths) - 50} more"] if len(paths) > 50 else [])]
    return "".join(f"\n  {path}" for path in shown)
