"""fill: replaces the leaves of a tree by the arrays of a checkpoint."""

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from flaxfit.checkpoints._compare import nearest
from flaxfit.importers._lazy import READERS, LazyArray
from flaxfit.importers._translator import CheckpointTranslator, Translation, raise_problems
from flaxfit.tree import ArrayLike, PyTree, flat, path_of, put_like


def fill(
    tree: PyTree,
    checkpoint: Mapping[str, ArrayLike],
    *,
    translator: CheckpointTranslator | None = None,
    strict: bool = True,
    partial: bool | str = False,
    dtype: DTypeLike | None = None,
    lazy: bool = False,
    **opts: object,
) -> PyTree:
    """Replaces the leaves of a tree by the arrays of a checkpoint with the same "/"-joined path.

    Compares everything before it reads anything. One error lists all missing, extra and duplicate
    names, and all shapes and kinds of dtypes that differ.

    >>> params = {"Dense_0": {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}}
    >>> checkpoint = {"Dense_0/kernel": np.ones((2, 3)), "Dense_0/bias": np.ones(3)}
    >>> fill(params, checkpoint)["Dense_0"]["bias"]
    Array([1., 1., 1.], dtype=float32)

    Args:
      tree: describes the result and its placement: arrays, or `jax.ShapeDtypeStruct`s.
      checkpoint: arrays by name, as the readers of this package return them.
      translator: the rules that turn the checkpoint's names into the tree's.
      strict: False skips arrays of the checkpoint that have no rule or no leaf in the tree; all
        other checks stay.
      partial: whether leaves that the checkpoint lacks keep their values: True, or a pattern that
        matches their whole paths, such as "head/.*".
      dtype: the dtype to cast floating arrays to; None: the dtype of the leaf.
      lazy: whether to leave `LazyArray`s in the tree instead of reading them.
      **opts: passed to the rules.

    Raises:
      ValueError: the checkpoint and the tree do not match.
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
    dtype: DTypeLike | None,
    lazy: bool,
) -> PyTree:
    """Fills a tree like `fill`, from a translated checkpoint."""
    leaves = flat(tree)
    problems = translation.problems(strict) + _misfits(translation, leaves, strict, partial)
    raise_problems(problems, "fill the tree from the checkpoint")

    def place(path: str) -> ArrayLike:
        if path not in translation.values:
            return leaves[path]
        return _place(translation.values[path], leaves[path], dtype, lazy)

    with ThreadPoolExecutor(READERS) as threads:
        placed = dict(zip(leaves, threads.map(place, leaves), strict=True))
    return jax.tree_util.tree_map_with_path(lambda path, _: placed[path_of(path)], tree)


def _misfits(
    translation: Translation, leaves: Mapping[str, ArrayLike], strict: bool, partial: bool | str
) -> list[str]:
    """Lists the differences between a checkpoint and a tree, one per line."""
    values = translation.values
    missing = [p for p, leaf in leaves.items() if p not in values and not _kept(p, leaf, partial)]
    extra = [name for name in values if name not in leaves] if strict else []
    lines = [f"{path} is not in the checkpoint{nearest(path, extra)}" for path in missing]
    lines += [
        f"{name}{_source(name, translation)} has no place here{nearest(name, missing)}"
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


def _place(value: ArrayLike, leaf: ArrayLike, dtype: DTypeLike | None, lazy: bool) -> ArrayLike:
    """Converts an array of the checkpoint to the type of the leaf that it replaces."""
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
    if isinstance(value, jax.Array):
        value = jnp.array(value, wanted)
    return put_like(value, leaf, wanted)


def _described(value: ArrayLike) -> tuple[tuple[int, ...], np.dtype]:
    value = value if hasattr(value, "shape") else np.asarray(value)
    return tuple(value.shape), value.dtype


def _kind(dtype: np.dtype) -> str:
    """Returns the kind of numbers, within which arrays may be cast."""
    kinds = {"float": jnp.floating, "integer": jnp.integer, "complex": jnp.complexfloating}
    return next((name for name, kind in kinds.items() if jnp.issubdtype(dtype, kind)), str(dtype))


def _kept(path: str, leaf: ArrayLike, partial: bool | str) -> bool:
    """Returns whether a leaf that the checkpoint lacks may, and can, keep its value."""
    allowed = re.fullmatch(partial, path) if isinstance(partial, str) else partial
    return bool(allowed) and not isinstance(leaf, jax.ShapeDtypeStruct)


def _source(name: str, translation: Translation) -> str:
    old = translation.sources.get(name, name)
    return "" if old == name else f" (from {old})"
