"""What callables tell of themselves: the object behind one, and how it runs."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def owner_of(callback: Any) -> Any:
    """The object of a callback: of a bound method its owner, of `every(...)` what it wraps."""
    callback = inspect.unwrap(callback)
    return getattr(callback, "__self__", callback)


def order_of(callback: Any) -> str:
    """When a callback gets a checkpoint: "first", "normal" or "last".

    >>> order_of(print)
    'normal'

    Raises:
      ValueError: its attribute `order` is none of these.
    """
    order = getattr(callback, "order", "normal")
    if order not in ("first", "normal", "last"):
        raise ValueError(
            f'The order of a callback is "first", "normal" or "last", got {order!r} from '
            f"{type(callback).__name__}."
        )
    return order


def runs_eagerly(runner: Any) -> bool:
    """Whether a strategy, or a function that one has bound, runs operation by operation.

    >>> runs_eagerly(abs)
    False
    """
    return getattr(runner, "runs_eagerly", False)


def by_row(function: F) -> F:
    """Marks a function whose values depend on their own rows and that refuses to broadcast.

    Losses and metrics with the mark are not traced to check that.
    """
    vars(function)["is_by_row"] = True
    return function


def is_by_row(function: Any) -> bool:
    """Whether `by_row` has marked a function itself: `functools.wraps` copies marks to others."""
    return getattr(function, "is_by_row", False) and not hasattr(function, "__wrapped__")
