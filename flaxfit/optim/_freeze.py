"""Freezing: excludes parameters from gradients and optimizers."""

from collections.abc import Sequence

import jax
import optax

from flaxfit.tree._paths import flat, label
from flaxfit.tree._types import Params, PyTree


def mask(tree: PyTree, patterns: Sequence[str]) -> PyTree:
    """The tree without the leaves whose paths match a pattern: they become `optax.MaskedNode`s.

    >>> mask({"stem": 1.0, "head": 2.0}, ["stem.*"])
    {'head': 2.0, 'stem': MaskedNode()}
    """
    is_frozen = label([(pattern, True) for pattern in patterns], tree, False)
    return jax.tree.map(lambda frozen, x: optax.MaskedNode() if frozen else x, is_frozen, tree)


def merge(masked: PyTree, whole: PyTree) -> PyTree:
    """The masked tree with the leaves of `whole` where its own are missing.

    >>> merge({"stem": optax.MaskedNode(), "head": 5.0}, {"stem": 1.0, "head": 2.0})
    {'head': 5.0, 'stem': 1.0}
    """

    def is_masked(x: object) -> bool:
        return isinstance(x, optax.MaskedNode)

    return jax.tree.map(
        lambda own, other: other if is_masked(own) else own, masked, whole, is_leaf=is_masked
    )


def carry_over(old: PyTree, new: PyTree) -> PyTree:
    """The leaves of `new`, in the state of `old` where that has a leaf of the same path.

    After a change of what is frozen, the moments of the other parameters are kept.

    >>> carry_over({"mu": {"head": 3.0}}, {"mu": {"head": 0.0, "stem": 0.0}})
    {'mu': {'head': 3.0, 'stem': 0.0}}
    """
    known = flat(old)
    leaves = [known.get(path, leaf) for path, leaf in flat(new).items()]
    return jax.tree.unflatten(jax.tree.structure(new), leaves)


def check_patterns(patterns: Sequence[str], params: Params) -> None:
    """Checks that each pattern freezes something, and that something is left to train.

    Raises:
      ValueError: a pattern matches nothing, or nothing is left; lists the paths.
    """
    for pattern in patterns:
        check_matches("freeze", pattern, params)
    if patterns and not jax.tree.leaves(mask(params, patterns)):
        raise ValueError(
            f"freeze={list(patterns)} freezes every parameter: there is nothing to train. The "
            f"parameters are:\n{_listing(params)}"
        )


def check_matches(owner: str, pattern: str, params: Params) -> None:
    """Checks that a pattern matches the path of a parameter.

    Raises:
      ValueError: it matches none; lists the paths.
    """
    if not any(flat(label([(pattern, True)], params, False)).values()):
        raise ValueError(
            f"{owner}: {pattern!r} matches no parameter (patterns match whole paths, so that "
            f"'stem/.*' is all of stem). The parameters are:\n{_listing(params)}"
        )


def _listing(params: Params, limit: int = 50) -> str:
    paths = list(flat(params))
    more = [f"... and {len(paths) - limit:,} more"] if len(paths) > limit else []
    return "\n".join(f"  {path}" for path in paths[:limit] + more)
