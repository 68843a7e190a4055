"""Refuses optimizers that need more of a step than mean gradients and parameters."""

import functools
import inspect
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType, MethodType

from flaxfit.tree._types import Function, PyTree

_BY_NAME = {
    "lookahead": "parameters as optax.LookaheadParams",
    "differentially_private_aggregate": "a gradient per example",
    "_deprecated_differentially_private_aggregate": "a gradient per example",
    "hutchinson_estimator_diag_hessian": "obj_fn",
    "sam.<locals>.opaque_update_fn": "grad_fn",
}


def check_demands(owner: str, optimizer: object) -> None:
    """Checks that an optimizer needs no more than mean gradients and parameters.

    Inspects closures, where optax's chains, groups and wrappers keep their parts.
    """
    found = {}
    for function in _functions(optimizer, set()):
        name = function.__qualname__.split(".")[0]
        demand = _BY_NAME.get(function.__qualname__, _BY_NAME.get(name)) or _required(function)
        if demand and "update" in function.__name__:
            found[name] = demand
    if found:
        needs = "; ".join(f"{name} needs {demand}" for name, demand in found.items())
        raise ValueError(
            f"{owner} cannot train with this optimizer: {needs}. A step calls "
            "optimizer.update(gradients, state, params) with mean gradients, and hands on nothing "
            "else. Use another optimizer, or a step of your own, TrainTask(step=...)."
        )


def _required(function: Function) -> str:
    """Names the keyword arguments without which a function cannot be called."""
    parameters = inspect.signature(function).parameters.values()
    only = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    return ", ".join(p.name for p in only if p.default is p.empty)


def _functions(part: PyTree, seen: set[int]) -> Iterator[FunctionType]:
    """Yields the functions in an optimizer, as far as closures and containers show them."""
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, FunctionType):
        yield part
    for each in _within(part):
        yield from _functions(each, seen)


def _within(part: PyTree) -> list[PyTree]:
    if hasattr(part, "transformations"):
        return list(part.transformations)
    match part:
        case FunctionType():
            cells = part.__closure__ or ()
            return [cell.cell_contents for cell in cells if _is_filled(cell)]
        case MethodType():
            return [part.__func__]
        case functools.partial():
            return [part.func, *part.args]
        case tuple() | list():
            return list(part)
        case Mapping():
            return list(part.values())
        case _:
            is_optimizer = hasattr(part, "update") and hasattr(part, "__dict__")
            return list(vars(part).values()) if is_optimizer else []


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
