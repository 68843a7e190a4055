"""What callables tell of themselves: the object behind one, and how it runs."""

import inspect
from typing import Any


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
