"""The names by which models tell training from evaluation, and what to set them to."""

import inspect
from collections.abc import Mapping
from typing import Any

_IN_TRAINING = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}


def flags(values: Mapping[str, Any], train: bool) -> dict[str, bool]:
    """The switches among named values, set for training or for evaluation.

    A value that is neither a bool nor None, such as a `training` that holds settings, is no switch.

    >>> flags({"features": 3, "deterministic": None}, train=False)
    {'deterministic': True}
    """
    return {
        name: train == in_training
        for name, in_training in _IN_TRAINING.items()
        if name in values and isinstance(values[name], bool | None)
    }


def call_flags(function: Any, train: bool) -> dict[str, bool]:
    """The switches among the arguments of a function.

    >>> call_flags(lambda x, train: x, train=True)
    {'train': True}
    """
    found = parameters(function).values()
    by_keyword = (p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return flags({p.name: None if p.default is p.empty else p.default for p in by_keyword}, train)


def parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function by name; none where Python cannot tell them."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
