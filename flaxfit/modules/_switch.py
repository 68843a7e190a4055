"""train_and_eval: the functions of a model, with its flags set for training or evaluation."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from flax import linen as nn

from flaxfit.modules._flags import call_defaults, call_flags, check_switches, flags, input_names
from flaxfit.modules._functions import ModelFunctions, Names, with_losses
from flaxfit.modules._handle import ModuleHandle, attached, is_module, with_handle
from flaxfit.modules._nnx import from_nnx
from flaxfit.modules._nnx_factory import is_factory, is_nnx
from flaxfit.tree import Function, PyTree, Variables, check_is_function, parameters


def train_and_eval(module: Any, *, losses: Names = ()) -> tuple[ModelFunctions, ModelFunctions]:
    """Makes the functions of a model for training, and its functions for evaluation.

    The flag is a field of the module or an argument of its call, named `train`, `training`,
    `is_training`, `deterministic` or `use_running_average`.

    >>> training, evaluation = train_and_eval(nn.Dropout(0.5, deterministic=None))
    >>> float(evaluation.apply({}, 3.0))
    3.0

    Args:
      module: a Linen module, an NNX module or a factory `(rngs) -> module`, or an
        `(init, apply)` pair.
      losses: collections whose values are terms of the loss, besides "losses"; for NNX, types of
        variables or their names.

    Raises:
      TypeError: it is none of these.
    """
    training, evaluation = (functions_of(module, train=t, losses=losses) for t in (True, False))
    return training, evaluation


def functions_of(module: Any, *, train: bool, losses: Names = ()) -> ModelFunctions:
    """Makes the functions of a model for training or for evaluation; see `train_and_eval`."""
    if isinstance(module, nn.Module):
        functions = _linen(module, train)
        return with_losses(functions, losses, are_required=train)
    if isinstance(module, tuple) and len(module) == 2 and all(map(callable, module)):
        functions = _pair(module, train)
        return with_losses(functions, losses) if train else functions
    if is_nnx(module):
        return from_nnx(module, train=train, losses=losses)
    hint = ""
    if isinstance(module, type):
        name = module.__name__
        hint = f" Make an instance: {name}(...)."
        if is_module(module):
            hint = (
                f" Its class needs arguments: pass {name}(..., rngs=nnx.Rngs(0)), or the factory "
                f"`lambda rngs: {name}(..., rngs=rngs)`."
            )
    elif isinstance(getattr(module, "__self__", None), nn.Module):
        hint = " It is a method: pass the module itself."
    elif isinstance(module, Mapping):
        hint = " These are variables: pass the module that they are of."
    elif callable(module):
        hint = " A function or another family's model: wrap it by flaxfit.modules.from_function."
    raise TypeError(
        "A model must be a Linen module, an NNX module, a factory of one that takes rngs, or an "
        f"(init, apply) pair; got {module!r:.80}.{hint}"
    )


def as_apply(owner: str, given: Any, *, train: bool) -> Function:
    """Returns the `apply` of a module; a function is returned unchanged.

    Raises:
      TypeError: it is neither a function nor a module.
    """
    if is_module(given) or is_factory(given):
        return functions_of(given, train=train).apply
    check_is_function(owner, given, "apply")
    if not callable(given):
        raise TypeError(
            f"{owner} needs a module or an apply function, got {given!r:.80}: pass apply("
            "variables, *inputs, ...)."
        )
    return given


def check_streams(owner: str, names: Sequence[str], apply: object) -> None:
    """Checks that an NNX module has the random streams of these names.

    "dropout" and "params" may be named for every module, as they are by default.
    """
    handle = handle_of(apply)
    if handle is None or handle.streams is None:
        return
    if unknown := [n for n in names if n not in handle.streams | {"dropout", "params"}]:
        raise ValueError(
            f"{owner}: rngs contains {', '.join(unknown)}, but the module has the streams "
            f"{', '.join(sorted(handle.streams)) or 'none'}."
        )


def as_init(owner: str, given: Any, apply: object = None) -> Any:
    """Returns the `init` of a module, perhaps that of `apply`; returns anything else unchanged."""
    if not (is_module(given) or is_factory(given)):
        check_is_function(owner, given, "init")
        return given
    handle = handle_of(apply)
    if handle is not None and handle.module() is given:
        return handle.init(given)
    return functions_of(given, train=True).init


def switched(module: nn.Module, train: bool) -> tuple[nn.Module, dict[str, bool]]:
    """Returns a Linen module with its flags set as fields, and the flags to pass to its call.

    A flag that is both a field and an argument is an argument if the field is None, as in Linen.
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
    own, arguments = switched(module, train)
    init, apply = (functools.partial(f, **arguments) for f in (own.init, own.apply))
    return ModelFunctions(init, with_handle(apply, _linen_handle(module, init)))


def _linen_handle(module: nn.Module, init: Function) -> ModuleHandle:
    return ModuleHandle(
        module=lambda: module,
        init=lambda module: init,
        merged=lambda variables: switched(module, False)[0].bind(variables),
        inputs=lambda: input_names(module) if callable(module) else None,
        evaluated=lambda: functions_of(module, train=False).apply,
    )


def handle_of(apply: object) -> ModuleHandle | None:
    """Returns the handle of an `apply`'s module, or None if unknown."""
    owner = getattr(apply, "__self__", None)
    if isinstance(owner, nn.Module) and apply == owner.apply:
        return _linen_handle(owner, owner.init)
    return attached(apply)


def in_evaluation(apply: Function) -> Function:
    """Makes the `apply` of the same module in evaluation mode.

    Calling it raises an error if the module is unknown.
    """

    def measure(variables: Variables, *inputs: PyTree, **named: PyTree) -> PyTree:
        handle: Any = handle_of(apply)
        return handle.evaluated()(variables, *inputs, **named)

    return measure


def inputs_of(apply: Function | None) -> tuple[str, ...] | None:
    """Returns the names of the inputs of an `apply`; None: any, or unknown."""
    handle = handle_of(apply)
    if handle is not None:
        return handle.inputs()
    return None if apply is None else input_names(functools.partial(apply, None))


def _pair(pair: tuple[Function, Function], train: bool) -> ModelFunctions:
    owner = getattr(pair[1], "__self__", None)
    if isinstance(owner, nn.Module) and pair == (owner.init, owner.apply):
        return _linen(owner, train)
    for function in pair:
        required = (p.name for p in parameters(function).values() if p.default is p.empty)
        check_switches(dict.fromkeys(required), "A function of the pair")
    # Return a function without flags unchanged, so that callers can compare it by identity.
    switches = ((function, call_flags(function, train)) for function in pair)
    return ModelFunctions(*(functools.partial(f, **set_) if set_ else f for f, set_ in switches))
