"""What callables tell of themselves: the object behind one, and how it runs."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def owner_of(callback: Any) -> Any:
    """The object behind a callback: inside of `every` and the like, of `history.append`."""
    callback = inspect.unwrap(callback)
    return getattr(callback, "__self__", callback)


def runs_eagerly(strategy_or_function: Any) -> bool:
    """Whether a strategy, or a function that one has bound, runs operation by operation.

    >>> runs_eagerly(abs)
    False
    """
    return getattr(strategy_or_function, "runs_eagerly", False)


def by_row(function: F) -> F:
    """Marks a function whose values depend on their own rows and that refuses to broadcast.

    Losses and metrics with the mark are not traced to check that.
    """
    vars(function)["is_by_row"] = True
    return function


def is_by_row(function: Any) -> bool:
    """Whether `by_row` has marked a function itself: `functools.wraps` copies marks to others."""
    return getattr(function, "is_by_row", False) and not hasattr(function, "__wrapped__")
