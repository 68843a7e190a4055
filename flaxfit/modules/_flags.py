"""The names by which models tell training from evaluation, and what to set them to."""

import inspect
from collections.abc import Mapping
from typing import Any

from flaxfit.tree._types import PyTree

_IN_TRAINING = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}


# What others call such a switch: left alone, it would be off in training or on in evaluation.
_UNKNOWN = frozenset(
    ("eval", "eval_mode", "evaluation", "in_training", "inference", "inference_mode", "is_eval")
    + ("is_evaluation", "is_inference", "is_test", "is_testing", "is_train", "test", "test_mode")
    + ("testing", "train_mode", "training_mode")
)


def switches(train: bool) -> dict[str, bool]:
    """The switches by all their names, set for training or for evaluation.

    >>> switches(train=False)["deterministic"]
    True
    """
    return {name: train == in_training for name, in_training in _IN_TRAINING.items()}


def flags(values: Mapping[str, PyTree], train: bool) -> dict[str, bool]:
    """The switches among named values, set for training or for evaluation.

    A value that is neither a bool nor None, such as a `training` that holds settings, is no switch.

    >>> flags({"features": 3, "deterministic": None}, train=False)
    {'deterministic': True}
    """
    return {
        name: value
        for name, value in switches(train).items()
        if name in values and isinstance(values[name], bool | None)
    }


def call_flags(function: Any, train: bool) -> dict[str, bool]:
    """The switches among the arguments of a function.

    >>> call_flags(lambda x, train: x, train=True)
    {'train': True}
    """
    return flags(call_defaults(function), train)


def call_defaults(function: Any) -> dict[str, Any]:
    """The arguments of a function that can be given by name, and their defaults, or None.

    >>> call_defaults(lambda x, train=True: x)
    {'x': None, 'train': True}
    """
    found = parameters(function).values()
    by_keyword = (p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return {p.name: None if p.default is p.empty else p.default for p in by_keyword}


def check_switches(values: Mapping[str, PyTree], owner: str) -> None:
    """Refuses a switch between training and evaluation by a name that is not known.

    Raises:
      ValueError: it lists the names that are.
    """
    found = [name for name in values if name in _UNKNOWN and isinstance(values[name], bool | None)]
    if found:
        raise ValueError(
            f"{owner} has a switch named {', '.join(found)}, which would not be set: call it "
            f"{', '.join(_IN_TRAINING)}. Or give Model a pair (module.init, apply) with "
            "`def apply(variables, *inputs, train, **options)`."
        )


def parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function by name; none where Python cannot tell them."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
