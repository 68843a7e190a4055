"""Refuses concurrent training of one model: two calls would donate the same arrays."""

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def by_one_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Refuses a call while another runs on the same first argument, in any thread."""

    @functools.wraps(function)
    def alone(*arguments: P.args, **options: P.kwargs) -> T:
        owner = vars(arguments[0])
        # Reentrant: a nested call in the same thread gets the error below, not `_busy`.
        turn = owner.setdefault("_turn", threading.RLock())
        if not turn.acquire(blocking=False):
            raise _busy("train another model in this one")
        try:
            if owner.get("_thread") is not None:
                raise RuntimeError(
                    "This model or loop is already training, and this code runs within that call: "
                    "let it return first, or train another model here."
                )
            try:
                owner["_thread"] = threading.get_ident()
                return function(*arguments, **options)
            finally:
                owner["_thread"] = None
        finally:
            turn.release()

    return alone


def check_thread(owner: object) -> None:
    """Refuses to read the state of a model or loop that another thread trains."""
    if vars(owner).get("_thread") not in (None, threading.get_ident()):
        raise _busy("use the checkpoint that a callback receives, or one that the run has saved")


def _busy(advice: str) -> RuntimeError:
    return RuntimeError(
        "Another thread is training this model or loop, which holds one state: wait for that "
        f"thread, or {advice}."
    )
