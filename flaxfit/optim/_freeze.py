"""Freezing: excludes parameters from gradients and optimizers."""

from collections.abc import Sequence

import jax
import optax

from flaxfit.tree import Params, PyTree, flat, label, label_of


def mask(tree: PyTree, patterns: Sequence[str]) -> PyTree:
    """Replaces the leaves whose paths match a pattern by `optax.MaskedNode`s.

    >>> mask({"stem": 1.0, "head": 2.0}, ["stem.*"])
    {'head': 2.0, 'stem': MaskedNode()}
    """
    is_frozen = label([(pattern, True) for pattern in patterns], tree, False)
    return jax.tree.map(lambda frozen, x: optax.MaskedNode() if frozen else x, is_frozen, tree)


def is_masked(node: object) -> bool:
    """Returns whether a node of a tree stands for a masked parameter."""
    return isinstance(node, optax.MaskedNode)


def merge(masked: PyTree, whole: PyTree) -> PyTree:
    """Fills the masked nodes of a tree with the leaves of `whole`.

    >>> merge({"stem": optax.MaskedNode(), "head": 5.0}, {"stem": 1.0, "head": 2.0})
    {'head': 5.0, 'stem': 1.0}
    """
    return jax.tree.map(
        lambda own, other: other if is_masked(own) else own, masked, whole, is_leaf=is_masked
    )


def carry_over(old: PyTree, new: PyTree) -> PyTree:
    """Replaces the leaves of `new` by the leaves of `old` with the same path.

    >>> carry_over({"mu": {"head": 3.0}}, {"mu": {"head": 0.0, "stem": 0.0}})
    {'mu': {'head': 3.0, 'stem': 0.0}}
    """
    known = flat(old)
    leaves = [known.get(path, leaf) for path, leaf in flat(new).items()]
    return jax.tree.unflatten(jax.tree.structure(new), leaves)


def check_patterns(patterns: Sequence[str], params: Params) -> None:
    """Checks that each pattern freezes a parameter, and that some parameter stays trainable."""
    for pattern in patterns:
        check_matches("freeze", pattern, params)
    if patterns and not jax.tree.leaves(mask(params, patterns)):
        raise ValueError(
            f"freeze={[*map(label_of, patterns)]} freezes every parameter: there is nothing to "
            f"train. The parameters are:{listing(list(flat(params)))}"
        )


def check_matches(owner: str, pattern: str, params: Params) -> None:
    """Checks that a pattern matches the path of a parameter."""
    if not any(flat(label([(pattern, True)], params, False)).values()):
        raise ValueError(
            f"{owner}: {label_of(pattern)!r} matches no parameter (patterns match whole paths: "
            f"use 'stem/.*' for all of stem). The parameters are:{listing(list(flat(params)))}"
        )


def listing(paths: Sequence[str]) -> str:
    """Lists at most 50 paths for a message, one per line."""
    more = [f"... and {len(paths) - 50:,} more"] if len(paths) > 50 else []
    return "".join(f"\n  {path}" for path in [*paths[:50], *more])
