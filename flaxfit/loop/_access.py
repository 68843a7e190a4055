"""Refuses a second thread where the first one trains: both would donate the same arrays."""

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def by_one_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Refuses a call while another thread is in one with the same first argument."""

    @functools.wraps(function)
    def alone(*arguments: P.args, **options: P.kwargs) -> T:
        turn = vars(arguments[0]).setdefault("_turn", threading.RLock())
        if not turn.acquire(blocking=False):
            raise RuntimeError(
                "Another thread is training this model or loop, which holds one state: wait for "
                "that thread, or train another model in this one."
            )
        try:
            return function(*arguments, **options)
        finally:
            turn.release()

    return alone
