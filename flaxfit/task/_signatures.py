"""Checks the signatures of a task's functions against the arguments of their calls."""

import functools
import inspect
from typing import Any

from flaxfit.tree import Function, parameters


def takes_ema(task: Any) -> bool:
    """Returns whether the objective receives the model with averaged parameters as `ema`.

    An objective with a default for `ema` receives it only if the task keeps an average. In an
    `EvalTask`, `ema` is the measured model itself.
    """
    asked = _ema_of(task.objective)
    return asked is not None and (
        asked.default is asked.empty or getattr(task, "ema", 1) is not None
    )


def objective_in_evaluation(task: Any) -> Function | None:
    """Returns a training task's objective for evaluation, with the same decision about `ema`."""
    asked = _ema_of(task.objective)
    if asked is None or takes_ema(task):
        return task.objective
    return functools.partial(task.objective, ema=asked.default)


def _ema_of(objective: Any) -> inspect.Parameter | None:
    """Returns the parameter `ema` of an objective, unless a partial function binds it."""
    if isinstance(objective, functools.partial) and "ema" in objective.keywords:
        return None
    found = parameters(objective).get("ema")
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return found if found is not None and found.kind in by_name else None


def check_call(
    option: str,
    function: Any,
    *arguments: str,
    returns: str,
    named: tuple[str, ...] | None = None,
) -> None:
    """Checks that an option is a function of these arguments, or None.

    With `named`, the function may require further arguments by keyword.
    """
    if function is None:
        return
    is_alone = len(arguments) == 1
    form = arguments[0] if is_alone else f"({', '.join(arguments)})"
    if not callable(function):
        raise TypeError(f"{option} must be {form} -> {returns}, got {function!r:.80}.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some callables have no signature.
        return
    bind = signature.bind if named is None else signature.bind_partial
    try:
        bind(*arguments, **dict.fromkeys(named or ()))
    except TypeError as error:
        more = "" if named is None else ", and by keyword with its companions and ema"
        raise TypeError(
            f"{option} is called with {form}{' alone' if is_alone else ''}{more}, but its "
            f"signature is {signature}: {error}."
        ) from None
