"""Inspects callables: their parameters, the object and order of a callback, and marks."""

import functools
import inspect
from collections.abc import Mapping
from typing import TypeVar

from flaxfit.tree._types import Function, PyTree

F = TypeVar("F", bound=Function)


def parameters(function: Function | None) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function by name; empty if Python cannot inspect it."""
    try:
        return {} if function is None else inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def owner_of(callback: Function) -> PyTree:
    """Returns the object of a callback: the `self` of a method, the callback within `every(...)`.

    Other callables are returned unchanged.
    """
    # Stop at a bound method: one with a decorated function has a `__wrapped__` without `self`.
    callback = inspect.unwrap(callback, stop=lambda each: hasattr(each, "__self__"))
    return getattr(callback, "__self__", callback)


def order_of(callback: object) -> str:
    """Returns when a callback gets a checkpoint: "first", "normal" or "last"."""
    order = getattr(callback, "order", "normal")
    if order not in ("first", "normal", "last"):
        raise ValueError(
            f'The order of a callback is "first", "normal" or "last", got {order!r} from '
            f"{type(callback).__name__}."
        )
    return order


def runs_eagerly(function: Function) -> bool:
    """Returns whether a strategy has bound a function to run operation by operation."""
    return getattr(function, "runs_eagerly", False)


def by_row(function: F) -> F:
    """Marks a loss or metric as computed row by row, without broadcasting.

    Marked functions are not traced to verify that.
    """
    vars(function)["is_by_row"] = True
    return function


def is_by_row(function: object) -> bool:
    """Returns whether a function is marked by `by_row`; a copy by `functools.wraps` is not."""
    if isinstance(function, functools.partial) and not function.args:
        return is_by_row(function.func)
    return getattr(function, "is_by_row", False) and not hasattr(function, "__wrapped__")
