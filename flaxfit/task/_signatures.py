"""What the functions of a task are called with, checked against their signatures."""

import functools
import inspect
from typing import Any

from flaxfit.tree import Function, parameters


def takes_ema(task: Any) -> bool:
    """Whether the objective of a task is given the model with the average of its parameters.

    One that has a default for `ema` is, if the task keeps an average; an `EvalTask` measures one
    set of weights, which is the average as well.
    """
    asked = _ema_of(task.objective)
    return asked is not None and (
        asked.default is asked.empty or getattr(task, "ema", 1) is not None
    )


def objective_in_evaluation(task: Any) -> Function | None:
    """The objective of a task that is trained, which in evaluation is given `ema` only if it is."""
    asked = _ema_of(task.objective)
    if asked is None or takes_ema(task):
        return task.objective
    return functools.partial(task.objective, ema=asked.default)


def _ema_of(objective: Any) -> inspect.Parameter | None:
    """The parameter `ema` of an objective, unless a partial function has a value for it."""
    if isinstance(objective, functools.partial) and "ema" in objective.keywords:
        return None
    found = parameters(objective).get("ema")
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return found if found is not None and found.kind in by_name else None


def check_call(
    option: str, function: Any, *arguments: str, named: tuple[str, ...] | None = None
) -> None:
    """Checks that a function can be called with these arguments; with `named`, and with others."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # None and some callables have no signature.
        return
    bind = signature.bind if named is None else signature.bind_partial
    try:
        bind(*arguments, **dict.fromkeys(named or ()))
    except TypeError as error:
        what = f"{arguments[0]} alone" if len(arguments) == 1 else f"({', '.join(arguments)})"
        more = "" if named is None else ", and by keyword with its companions and ema"
        raise TypeError(
            f"{option} is called with {what}{more}; the one given takes {signature}: {error}."
        ) from None
