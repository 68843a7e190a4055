"""train_and_eval: the functions of a model, its switch set for training or for evaluation."""

import functools
from typing import Any

from flax import linen as nn

from flaxfit.modules._flags import call_defaults, call_flags, check_switches, flags, parameters
from flaxfit.modules._functions import ModelFunctions, Names, with_losses
from flaxfit.modules._nnx import from_nnx, is_nnx
from flaxfit.tree._types import Function


def train_and_eval(module: Any, *, losses: Names = ()) -> tuple[ModelFunctions, ModelFunctions]:
    """Makes the functions of a model for training, and those for evaluation.

    The switch is a field of the module or an argument of its call, named `train`, `training`,
    `is_training`, `deterministic` or `use_running_average`.

    >>> training, evaluation = train_and_eval(nn.Dropout(0.5, deterministic=None))
    >>> float(evaluation.apply({}, 3.0))
    3.0

    Args:
      module: a linen module, an nnx module or a factory `(rngs) -> module`, or an
        `(init, apply)` pair.
      losses: collections whose values are terms of the loss, besides "losses"; of nnx, types of
        variables or their names.

    Raises:
      TypeError: it is none of these.
    """
    if isinstance(module, nn.Module):
        return with_losses(_linen(module, True), losses), _linen(module, False)
    if isinstance(module, tuple) and len(module) == 2 and all(map(callable, module)):
        return with_losses(_pair(module, True), losses), _pair(module, False)
    if is_nnx(module):
        training, evaluation = (from_nnx(module, train=t, losses=losses) for t in (True, False))
        return training, evaluation
    hint = ""
    if isinstance(module, type):
        hint = f" Make an instance: {module.__name__}(...)."
    elif callable(module):
        hint = " A function or another family's model: wrap it by flaxfit.modules.from_function."
    raise TypeError(
        "A model must be a linen module, an nnx module, a factory of one that takes rngs, or an "
        f"(init, apply) pair; got {module!r:.80}.{hint}"
    )


def switched(module: nn.Module, train: bool) -> tuple[nn.Module, dict[str, bool]]:
    """A linen module with its fields set, and the switches to pass to its call.

    A switch that is both a field and an argument is passed if the field is None, as linen does.
    """
    values = {name: getattr(module, name, None) for name in module.__dataclass_fields__}
    check_switches({**values, **call_defaults(module.__call__)}, type(module).__name__)
    fields: dict[str, Any] = flags(values, train)
    arguments = call_flags(module.__call__, train)
    required = parameters(module.__call__)
    for name in fields.keys() & arguments.keys():
        is_required = required[name].default is required[name].empty
        del (fields if values[name] is None or is_required else arguments)[name]
    return (module.clone(**fields) if fields else module), arguments


def _linen(module: nn.Module, train: bool) -> ModelFunctions:
    module, arguments = switched(module, train)
    functions = (functools.partial(f, **arguments) for f in (module.init, module.apply))
    return ModelFunctions(*functions)


def _pair(pair: tuple[Function, Function], train: bool) -> ModelFunctions:
    owner = getattr(pair[1], "__self__", None)
    if isinstance(owner, nn.Module) and pair == (owner.init, owner.apply):
        return _linen(owner, train)
    for function in pair:
        required = (p.name for p in parameters(function).values() if p.default is p.empty)
        check_switches(dict.fromkeys(required), "A function of the pair")
    # A function without a switch is returned as it is, so that callers can compare it.
    switches = ((function, call_flags(function, train)) for function in pair)
    return ModelFunctions(*(functools.partial(f, **set_) if set_ else f for f, set_ in switches))
