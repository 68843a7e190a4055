"""The learning rates among the hyperparameters of an optimizer."""

from collections.abc import Mapping
from typing import Any


def learning_rates(values: Mapping[str, Any]) -> dict[str | None, float]:
    """The learning rates by group; that of an optimizer without groups under None.

    >>> learning_rates({"learning_rate": 0.1, "b1": 0.9})
    {None: 0.1}
    >>> learning_rates({"stem/.*": {"learning_rate": 0.01}, "head/.*": {"learning_rate": 0.1}})
    {'stem/.*': 0.01, 'head/.*': 0.1}

    Args:
      values: hyperparameters by name, or by group and name.
    """
    groups = {name: own for name, own in values.items() if isinstance(own, Mapping)}
    found: dict[str | None, Any] = {name: own.get("learning_rate") for name, own in groups.items()}
    found[None] = values.get("learning_rate")
    return {name: rate for name, rate in found.items() if isinstance(rate, int | float)}
