"""fill: puts the arrays of a checkpoint in the places of a tree."""

import difflib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.importers._lazy import _READERS, LazyArray
from flaxfit.importers._translator import CheckpointTranslator, Translation, raise_problems
from flaxfit.tree._paths import flat, path_of
from flaxfit.tree._put import put
from flaxfit.tree._types import ArrayLike, PyTree


def fill(
    tree: PyTree,
    checkpoint: Mapping[str, Any],
    *,
    translator: CheckpointTranslator | None = None,
    strict: bool = True,
    partial: bool | str = False,
    dtype: Any = None,
    lazy: bool = False,
    **opts: Any,
) -> Any:
    """A copy of a tree whose leaves are the arrays of a checkpoint, by "/"-joined path.

    All is compared before anything is read: names that are missing, extra or taken twice and
    shapes and kinds of numbers that differ are listed in one error.

    >>> params = {"Dense_0": {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}}
    >>> checkpoint = {"Dense_0/kernel": np.ones((2, 3)), "Dense_0/bias": np.ones(3)}
    >>> fill(params, checkpoint)["Dense_0"]["bias"]
    Array([1., 1., 1.], dtype=float32)

    Args:
      tree: says what is expected, and where it goes: arrays, or `jax.ShapeDtypeStruct`s.
      checkpoint: arrays by name, as the readers of this package give them.
      translator: the rules that make the tree's names of the checkpoint's.
      strict: False leaves out arrays of the checkpoint that have no rule or no place in the
        tree. It relaxes nothing else.
      partial: whether leaves that the checkpoint lacks keep their values: True, or a pattern that
        matches their whole paths, such as "head/.*".
      dtype: what floating arrays are cast to; None is the dtype of the leaf.
      lazy: whether to leave `LazyArray`s in the tree instead of reading them.
      **opts: handed to the rules.

    Raises:
      ValueError: the checkpoint and the tree do not fit.
    """
    if translator is None:
        translation = Translation(checkpoint, {}, [], [], {})
    else:
        translation = translator.translate(checkpoint, **opts)
    return fill_from(translation, tree, strict=strict, partial=partial, dtype=dtype, lazy=lazy)


def fill_from(
    translation: Translation,
    tree: PyTree,
    *,
    strict: bool,
    partial: bool | str,
    dtype: Any,
    lazy: bool,
) -> Any:
    """What `fill` does once the rules have been applied."""
    leaves = flat(tree)
    problems = translation.problems(strict) + _misfits(translation, leaves, strict, partial)
    raise_problems(problems, "fill the tree from the checkpoint")

    def place(path: str) -> PyTree:
        leaf = leaves[path]
        if path not in translation.values:
            return leaf
        return _place(translation.values[path], leaf, dtype, lazy)

    with ThreadPoolExecutor(_READERS) as threads:
        placed = dict(zip(leaves, threads.map(place, leaves), strict=True))
    return jax.tree_util.tree_map_with_path(lambda path, _: placed[path_of(path)], tree)


def _misfits(
    translation: Translation, leaves: Mapping[str, PyTree], strict: bool, partial: bool | str
) -> list[str]:
    """How the arrays of a checkpoint differ from the leaves of a tree, a line each."""
    values = translation.values
    missing = [p for p, leaf in leaves.items() if p not in values and not _kept(p, leaf, partial)]
    extra = [name for name in values if name not in leaves] if strict else []
    lines = [f"{path} is not in the checkpoint{_nearest(path, extra)}" for path in missing]
    lines += [
        f"{name}{_source(name, translation)} has no place here{_nearest(name, missing)}"
        for name in extra
    ]
    for path, leaf in leaves.items():
        if path in values:
            there, here = _described(values[path]), _described(leaf)
            if there[0] != here[0] or _kind(there[1]) != _kind(here[1]):
                lines.append(
                    f"{path}{_source(path, translation)} is {there[1]} {there[0]} in the "
                    f"checkpoint, {here[1]} {here[0]} here"
                )
    return lines


def _place(value: Any, leaf: ArrayLike, dtype: Any, lazy: bool) -> Any:
    """One array of the checkpoint as the kind of leaf that it takes the place of."""
    wanted = _described(leaf)[1]
    if dtype is not None and _kind(wanted) == "float":
        wanted = np.dtype(dtype)
    if isinstance(value, LazyArray):
        value = value if value.dtype == wanted else value.astype(wanted)
        if lazy:
            return value
        value = value.get()
    if isinstance(leaf, np.ndarray | np.generic):
        return np.array(value, wanted)
    if isinstance(leaf, bool | int | float):
        return np.asarray(value).item()
    array = jnp.array(value, wanted)
    committed = not isinstance(leaf, jax.Array) or leaf.committed
    sharding = getattr(leaf, "sharding", None) if committed else None
    return array if sharding is None else put(array, sharding)


def _described(value: Any) -> tuple[tuple[int, ...], np.dtype]:
    value = value if hasattr(value, "shape") else np.asarray(value)
    return tuple(value.shape), value.dtype


def _kind(dtype: Any) -> str:
    """Which dtypes may be cast to one another: those of the same kind of numbers."""
    kinds = {"float": jnp.floating, "integer": jnp.integer, "complex": jnp.complexfloating}
    return next((name for name, kind in kinds.items() if jnp.issubdtype(dtype, kind)), str(dtype))


def _kept(path: str, leaf: ArrayLike, partial: bool | str) -> bool:
    """Whether a leaf that the checkpoint lacks may, and can, keep its value."""
    allowed = re.fullmatch(partial, path) if isinstance(partial, str) else partial
    return bool(allowed) and not isinstance(leaf, jax.ShapeDtypeStruct)


def _source(name: str, translation: Translation) -> str:
    old = translation.sources.get(name, name)
    return "" if old == name else f" (from {old})"


def _nearest(name: str, others: list[str]) -> str:
    close = difflib.get_close_matches(name, others, n=1, cutoff=0.8) if len(others) < 500 else []
    return f" (nearest: {close[0]})" if close else ""
