"""The switch between training and evaluation: found in a model and set for the user."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from flax import linen as nn

from flaxfit.modules._functions import ModelFunctions
from flaxfit.modules._nnx import from_nnx

_IN_TRAINING = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}


def train_and_eval(module: Any) -> tuple[ModelFunctions, ModelFunctions]:
    """The functions of a model for training, and those for evaluation.

    The switch is a field of the module or an argument of its call, named `train`, `training`,
    `is_training`, `deterministic` or `use_running_average`.

    >>> training, evaluation = train_and_eval(nn.Dropout(0.5, deterministic=None))
    >>> float(evaluation.apply({}, 3.0))
    3.0

    Args:
      module: a linen module, an nnx module or a factory `(rngs) -> module`, or an
        `(init, apply)` pair.

    Raises:
      TypeError: it is none of these.
    """
    if isinstance(module, nn.Module):
        return _linen(module, True), _linen(module, False)
    if isinstance(module, tuple) and len(module) == 2 and all(map(callable, module)):
        return _pair(module, True), _pair(module, False)
    if _is_nnx(module):
        return from_nnx(module, train=True), from_nnx(module, train=False)
    hint = ""
    if isinstance(module, type):
        hint = f" Make an instance: {module.__name__}(...)."
    raise TypeError(
        "A model must be a linen module, an nnx module, a factory of one that takes rngs, or an "
        f"(init, apply) pair; got {module!r:.80}.{hint}"
    )


def switched(module: nn.Module, train: bool) -> tuple[nn.Module, dict[str, bool]]:
    """A linen module with its fields set, and the arguments of the call that are to be set.

    >>> switched(nn.Dropout(0.5), train=False)[1]
    {'deterministic': True}
    """
    arguments = _switches(_parameters(module.__call__), train)
    fields = _switches(module.__dataclass_fields__, train)
    fields = {name: value for name, value in fields.items() if name not in arguments}
    return (module.clone(**fields) if fields else module), arguments


def _linen(module: nn.Module, train: bool) -> ModelFunctions:
    module, arguments = switched(module, train)
    functions = (functools.partial(f, **arguments) for f in (module.init, module.apply))
    return ModelFunctions(*functions)


def _pair(pair: tuple[Any, Any], train: bool) -> ModelFunctions:
    init, apply = pair
    arguments = _switches(_parameters(apply), train)
    return ModelFunctions(init, functools.partial(apply, **arguments) if arguments else apply)


def _switches(names: Any, train: bool) -> dict[str, bool]:
    return {name: train == value for name, value in _IN_TRAINING.items() if name in names}


def _parameters(function: Callable[..., Any]) -> Any:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _is_nnx(module: Any) -> bool:
    # A user of nnx has imported it; nobody else should pay for its import.
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    if isinstance(module, nnx.Module):
        return True
    is_function = callable(module) and not isinstance(module, type)
    return is_function and len(_parameters(module)) == 1
