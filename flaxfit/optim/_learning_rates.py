"""The learning rates among the hyperparameters of an optimizer."""

from collections.abc import Mapping

from flaxfit.tree._types import PyTree


def learning_rates(values: Mapping[str, PyTree]) -> dict[str | None, float]:
    """The learning rates by group; that of an optimizer without groups under None.

    >>> learning_rates({"learning_rate": 0.1, "b1": 0.9})
    {None: 0.1}
    >>> learning_rates({"stem/.*": {"learning_rate": 0.01}, "head/.*": {"learning_rate": 0.1}})
    {'stem/.*': 0.01, 'head/.*': 0.1}

    Args:
      values: hyperparameters by name, or by group and name; groups may hold groups.
    """
    return _of_group(None, values)


def in_group(values: Mapping[str, PyTree], group: str) -> dict[str | None, float]:
    """The learning rates of one group, and of the groups that it holds, by group.

    >>> in_group({"stem": {"learning_rate": 0.01}, "head": {"learning_rate": 0.1}}, "head")
    {'head': 0.1}
    """
    found: dict[str | None, float] = {}
    for name, own in values.items():
        if isinstance(own, Mapping):
            found |= _of_group(name, own) if name == group else in_group(own, group)
    return found


def _of_group(group: str | None, values: Mapping[str, PyTree]) -> dict[str | None, float]:
    found: dict[str | None, float] = {}
    rate = values.get("learning_rate")
    if isinstance(rate, int | float):
        found[group] = rate
    for name, own in values.items():
        if isinstance(own, Mapping):
            found |= _of_group(name, own)
    return found
