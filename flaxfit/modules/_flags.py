"""The train/eval flags: their names and values."""

from collections.abc import Mapping
from typing import Any

from flaxfit.tree import Function, parameters

_IN_TRAINING = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}


# Other arguments of a call or an `apply` that are not inputs.
_OF_FLAX = frozenset(("rngs", "rng", "mutable"))

# Other common names of a train/eval flag. flaxfit rejects them: left unset, the flag would be
# wrong in training or in evaluation.
_UNKNOWN = frozenset(
    ("eval", "eval_mode", "evaluation", "in_training", "inference", "inference_mode", "is_eval")
    + ("is_evaluation", "is_inference", "is_test", "is_testing", "is_train", "test", "test_mode")
    + ("testing", "train_mode", "training_mode")
)


def switches(train: bool) -> dict[str, bool]:
    """Returns all flags by name, set for training or for evaluation."""
    return {name: train == in_training for name, in_training in _IN_TRAINING.items()}


def flags(values: Mapping[str, object], train: bool) -> dict[str, bool]:
    """Returns the flags among named values, set for training or for evaluation.

    Only a bool or None is a flag, not, say, a `training` that holds settings.
    """
    found = [name for name in values if isinstance(values[name], bool | None)]
    return {name: value for name, value in switches(train).items() if name in found}


def call_flags(function: Function, train: bool) -> dict[str, bool]:
    """Returns the flags among the arguments of a function, set for training or for evaluation."""
    return flags(call_defaults(function), train)


def call_defaults(function: Function) -> dict[str, object]:
    """Returns the keyword arguments of a function, with their defaults or None."""
    found = parameters(function).values()
    by_keyword = (p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return {p.name: None if p.default is p.empty else p.default for p in by_keyword}


def input_names(function: Any) -> tuple[str, ...] | None:
    """Returns the names of the inputs of a function or module; None if it takes any name."""
    if type(function).__name__ == "Sequential" and getattr(function, "layers", None):
        return input_names(function.layers[0])  # It receives the arguments of the call.
    found = parameters(function).values()
    if not found or any(p.kind is p.VAR_KEYWORD for p in found):
        return None
    others = {*_IN_TRAINING, *_OF_FLAX}
    return tuple(p.name for p in found if p.kind is not p.VAR_POSITIONAL and p.name not in others)


def check_switches(values: Mapping[str, object], owner: str) -> None:
    """Raises an error for a train/eval flag with a name that flaxfit does not set."""
    found = [name for name in values if name in _UNKNOWN and isinstance(values[name], bool | None)]
    if found:
        raise ValueError(
            f"{owner} has a flag named {', '.join(found)}, which flaxfit does not set: call it "
            f"one of {', '.join(_IN_TRAINING)}. Or pass Model a pair (module.init, apply) with "
            "`def apply(variables, *inputs, train, **options)`."
        )
