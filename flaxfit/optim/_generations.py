"""Generations: bias correction for parameters that were unfrozen after the first update.

Adam divides moments by 1 - b**count. For a parameter unfrozen at count c the right count is
`count - c`, so each generation of parameters gets an update with its own counts.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from flaxfit.optim._freeze import is_masked
from flaxfit.tree import Json, OptState, Params, PyTree, flat, path_of, sections

_COUNTS = ("count", "t")
"""Optax's names of the number of updates of a moment."""


class Generation(NamedTuple):
    """The parameters that were unfrozen together."""

    paths: frozenset[str]
    start: tuple[int, ...]
    """The counts of the moments when they were unfrozen, in the order of the state."""


Generations = tuple[Generation, ...]
"""The generations unfrozen after the first update."""


def update_each(
    update: Callable[..., tuple[PyTree, OptState]],
    generations: Generations,
    grads: PyTree,
    state: OptState,
    params: Params,
    **extra: Any,
) -> tuple[PyTree, OptState]:
    """Calls an update once per generation, with the counts since its start.

    Each parameter gets its updates and moments from the call of its generation. XLA merges the
    computations that do not depend on the counts.
    """
    updates, new = update(grads, state, params, **extra)
    if not generations:
        return updates, new
    places = {place: path_of(place) for place, _ in jax.tree_util.tree_leaves_with_path(grads)}
    known = frozenset(places.values())

    # An array belongs to the parameter whose path its own path contains; a count to none.
    def owner(place: jax.tree_util.KeyPath) -> str:
        return next((places[part] for part in sections(place) if part in places), "")

    for paths, start in generations:
        begun = _with_counts(state, known, start)
        own_updates, own = update(grads, begun, params, **extra)

        def choose(
            place: jax.tree_util.KeyPath, old: PyTree, own: PyTree, paths: frozenset[str] = paths
        ) -> PyTree:
            return own if owner(place) in paths else old

        updates = jax.tree_util.tree_map_with_path(choose, updates, own_updates)
        new = jax.tree_util.tree_map_with_path(choose, new, own)
    return updates, new


def generations_after(
    generations: Generations, old: OptState, new: OptState, params: Params
) -> Generations:
    """Returns the generations after a change of `freeze` turned the state `old` into `new`."""
    known = frozenset(flat(params))
    before, now = _with_moments(old, known), _with_moments(new, known)
    kept = [Generation(each.paths & before & now, each.start) for each in generations]
    start = tuple(map(int, counts(new, known)))
    fresh = [Generation(now - before, start)] if any(start) else []
    return fitting((*kept, *fresh), new, params)


def fitting(generations: Generations, opt_state: OptState, params: Params) -> Generations:
    """Returns the generations that started at or before a state, which may be an earlier one."""
    if not generations:
        return ()
    present = [int(count) for count in counts(opt_state, frozenset(flat(params)))]
    return tuple(
        each
        for each in generations
        if each.paths
        and len(each.start) == len(present)
        and all(start <= count for start, count in zip(each.start, present, strict=True))
    )


def to_json(generations: Generations) -> Json:
    """Converts generations to JSON for a checkpoint."""
    return [[sorted(paths), list(start)] for paths, start in generations]


def from_json(generations: Iterable[Any]) -> Generations:
    """Reads what `to_json` returned.

    >>> generations = (Generation(frozenset({"stem"}), (500,)),)
    >>> from_json(to_json(generations)) == generations
    True
    """
    return tuple(Generation(frozenset(paths), tuple(start)) for paths, start in generations)


def counts(opt_state: OptState, paths: frozenset[str]) -> list[Any]:
    """Returns the counts of the bias correction of moments, in the order of the state.

    >>> counts(optax.adam(0.1).init({"w": 1.0}), frozenset({"w"}))
    [Array(0, dtype=int32)]
    """
    return [getattr(node, name) for node, name in _counted(opt_state, paths)]


def _with_moments(opt_state: OptState, paths: frozenset[str]) -> frozenset[str]:
    """Returns the paths of the parameters with moments that have a count."""
    nodes = (node for node, _ in _counted(opt_state, paths))
    return (
        frozenset(
            path for node in nodes for each in node._fields for path in flat(getattr(node, each))
        )
        & paths
    )


def _with_counts(opt_state: OptState, paths: frozenset[str], start: Sequence[int]) -> OptState:
    """Subtracts a generation's start from the counts of a state."""
    left = iter(start)

    def visit(node: Any) -> Any:
        name = _count_of(node, paths)
        if name is None:
            return node
        return node._replace(**{name: getattr(node, name) - next(left)})

    return jax.tree.map(visit, opt_state, is_leaf=lambda node: _count_of(node, paths) is not None)


def _counted(opt_state: OptState, paths: frozenset[str]) -> list[tuple[Any, str]]:
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: _count_of(node, paths) is not None)
    named = [(node, _count_of(node, paths)) for node in nodes]
    return [(node, name) for node, name in named if name is not None]


def _count_of(node: Any, paths: frozenset[str]) -> str | None:
    """Returns the count field of a state that holds only moments, such as `ScaleByAdamState`.

    In a state with other arrays the count may be a schedule's, or a position: returns None.
    """
    fields = getattr(node, "_fields", ())
    name = next((name for name in _COUNTS if name in fields), None)
    if name is None or not _is_count(getattr(node, name)):
        return None
    if isinstance(node, optax.contrib.MadgradState):  # Its rate depends on the count.
        return None
    others = [getattr(node, each) for each in fields if each != name]
    others = [each for each in others if not _is_count(each)]
    is_known = all(flat(each).keys() <= paths for each in others)
    # Moments of frozen parameters are masked.
    has_any = any(jax.tree.leaves(each, is_leaf=is_masked) for each in others)
    return name if is_known and has_any else None


def _is_count(leaf: Any) -> bool:
    is_scalar = getattr(leaf, "shape", None) == ()
    return is_scalar and jnp.issubdtype(leaf.dtype, jnp.integer)
