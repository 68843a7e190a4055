"""The arguments that an optimizer needs from a step; refuses those that no step provides."""

import contextlib
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

import optax

from flaxfit.optim._arguments import OPTAX_ARGUMENTS, named_arguments, takes_any
from flaxfit.optim._optimizer import Adjustable
from flaxfit.tree._types import Function, PyTree

_BY_EXAMPLE = "a gradient per example (clip each by TrainTask(example_grads_hook=...), add noise "
_BY_EXAMPLE += "by grads_hook=)"
_BY_NAME = {
    "lookahead": "parameters as optax.LookaheadParams",
    "differentially_private_aggregate": _BY_EXAMPLE,
    "_deprecated_differentially_private_aggregate": _BY_EXAMPLE,
}

# It names grad_fn to be called like the opaque form, and makes no use of it.
_IGNORES = "sam.<locals>.transparent_update_fn"


def check_demands(owner: str, optimizer: object) -> None:
    """Checks that an optimizer needs no more than what a step passes to it.

    Inspects closures, where Optax's chains, groups and wrappers keep their parts.
    """
    found = {}
    for function in _updates(optimizer):
        name = function.__qualname__.split(".")[0]
        if demand := _BY_NAME.get(name) or _required(function):
            found[name] = demand
    if found:
        needs = "; ".join(f"{name} needs {demand}" for name, demand in found.items())
        raise ValueError(
            f"{owner} cannot train with this optimizer: {needs}. A step calls "
            "optimizer.update(gradients, state, params) with mean gradients, and passes those of "
            f"{', '.join(sorted(OPTAX_ARGUMENTS))} that the optimizer accepts. Use another "
            "optimizer, or your own step, TrainTask(step=...)."
        )


def check_hook(optimizer: object) -> None:
    """Checks that a `grads_hook` changes all gradients that an optimizer uses."""
    taken = frozenset[str]()
    for function in _updates(optimizer):
        if function.__qualname__ != _IGNORES:
            taken |= named_arguments(function) - {"value"}
    if taken:
        raise ValueError(
            "grads_hook would change only a part of what this optimizer uses: it also takes "
            f"{', '.join(sorted(taken))}, which bypass the hook. Leave the hook out: "
            "example_grads_hook changes grad, too, and a transformation that is chained before "
            "the optimizer, optax.chain(optax.stateless(f), ...), its gradients alone."
        )


def arguments_of(optimizer: object) -> frozenset[str]:
    """The arguments that an optimizer accepts from a step, as far as its closures show.

    Only these are passed: `optax.contrib.sam` accepts no others.
    """
    found = frozenset[str]()
    for function in _updates(optimizer):
        every = takes_any(function) and not _is_known(function)
        found |= OPTAX_ARGUMENTS if every else named_arguments(function)
    return found


def not_taken(optimizer: Any, names: Iterable[str]) -> list[str]:
    """The names among these of which no update, as far as closures show, takes an argument."""
    unknown = set(names) - OPTAX_ARGUMENTS
    if not unknown or not isinstance(optimizer.update, FunctionType | MethodType):
        return []
    for part in [optimizer.update, *parts_of(optimizer)]:
        if isinstance(part, Adjustable):  # It refuses unknown names.
            return []
        # Optax's functions pass arguments on; any other function may be an update.
        if isinstance(part, FunctionType | MethodType) and not _is_known(part):
            if takes_any(part):
                return []
            unknown -= inspect.signature(part).parameters.keys()
    return sorted(unknown)


def _is_known(function: Function) -> bool:
    return (function.__module__ or "").split(".")[0] in ("optax", "flaxfit")


def _required(function: Function) -> str:
    """Names the arguments without which an update cannot be called, and which no step has."""
    parameters = inspect.signature(function).parameters.values()
    only = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in OPTAX_ARGUMENTS]
    return ", ".join(p.name for p in only if p.default is p.empty)


def _updates(optimizer: object) -> list[FunctionType]:
    """The functions in an optimizer that update, by their name or their place."""
    parts = parts_of(optimizer)
    placed = [part.update for part in parts if isinstance(part, optax.GradientTransformation)]
    named = [part for part in parts if "update" in getattr(part, "__name__", "")]
    return [part for part in dict.fromkeys([*placed, *named]) if isinstance(part, FunctionType)]


def parts_of(optimizer: object) -> list[PyTree]:
    """Lists what an optimizer is made of, as far as closures and containers show it."""
    return list(_parts(optimizer, set()))


def _parts(part: PyTree, seen: set[int]) -> Iterator[PyTree]:
    if id(part) in seen:
        return
    seen.add(id(part))
    yield part
    for each in _within(part):
        yield from _parts(each, seen)


def _within(part: PyTree) -> list[PyTree]:
    if hasattr(part, "transformations"):
        return list(part.transformations)
    match part:
        case FunctionType():
            cells = part.__closure__ or ()
            return [cell.cell_contents for cell in cells if _is_filled(cell)]
        case MethodType():
            return [part.__func__, part.__self__]
        case functools.partial():
            return [part.func, *part.args]
        case tuple() | list():
            return [*part, *_injected(part)]
        case Mapping():
            return list(part.values())
        case _:
            is_optimizer = hasattr(part, "update") and hasattr(part, "__dict__")
            return list(vars(part).values()) if is_optimizer else []


def _injected(part: PyTree) -> list[PyTree]:
    """The optimizer that `optax.inject_hyperparams` rebuilds in each update."""
    with contextlib.suppress(Exception):
        cells = inspect.getclosurevars(part.init).nonlocals
        scheduled = {name: each(each.init()) for name, each in cells["sched_hps"].items()}
        factory = cells["inner_factory"]
        return [factory(**cells["other_hps"], **cells["numeric_hps"], **scheduled)]
    return []


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
