"""Paths of pytrees ("encoder/Dense_0/kernel") and rules over them: `(pattern, value)` pairs."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from flaxfit.tree._types import PyTree

Rules = Sequence[tuple[str, Any]]


def path_of(key_path: jax.tree_util.KeyPath) -> str:
    """Joins the key path of a leaf with "/"."""
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def sections(path: jax.tree_util.KeyPath) -> Iterator[jax.tree_util.KeyPath]:
    """Yields the contiguous sections of a key path: longest first, then last first."""
    for length in range(len(path), -1, -1):
        for start in range(len(path) - length, -1, -1):
            yield path[start : start + length]


def flat(tree: PyTree) -> dict[str, PyTree]:
    """Returns the leaves of a tree by path, in the tree's own order."""
    return {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def match(rules: Rules, path: str, default: Any = None) -> Any:
    """Returns the value of the first rule whose pattern matches the whole path."""
    return next((value for pattern, value in rules if re.fullmatch(pattern, path)), default)


def label(rules: Rules, tree: PyTree, default: Any = None) -> PyTree:
    """Maps every leaf of a tree to the value of the first rule that matches its path."""
    return jax.tree_util.tree_map_with_path(lambda p, _: match(rules, path_of(p), default), tree)
