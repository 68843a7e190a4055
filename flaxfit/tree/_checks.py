"""Checks of counts, local paths, functions and their arguments."""

import functools
import inspect
import operator
import os
import re
from collections.abc import Sequence
from pathlib import Path

from flaxfit.tree._functions import parameters
from flaxfit.tree._types import PyTree

# "gs://bucket", and "gs:/bucket" as pathlib writes it.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_TARGETS = {"actual", "expected", "ground_truth", "label", "labels", "target", "targets"}
_TARGETS |= {"true", "truth", "y", "y_true"}
_OUTPUTS = {"logit", "logits", "output", "outputs", "pred", "predicted", "prediction"}
_OUTPUTS |= {"predictions", "preds", "score", "scores", "y_hat", "y_pred", "y_score", "yhat"}
_MODELS = {"model", "params", "variables"}
_NOT_JAX = ("sklearn", "tensorflow", "torch", "torchmetrics")
_KERAS = ("keras", "tf_keras")


def whole_number(name: str, value: PyTree, *, least: int = 1, other: str | None = "") -> int:
    """Checks that an argument is an integer, not below `least`, and returns it as an `int`.

    >>> whole_number("n_steps", 3.0)
    Traceback (most recent call last):
    TypeError: n_steps must be an integer, got 3.0.

    The name, and what else the caller takes, are for messages.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        kinds = f"an integer or {other!r}" if other != "" else "an integer"
        raise TypeError(f"{name} must be {kinds}, got {value!r:.60}.")
    if number < least:
        raise ValueError(f"{name} must be {least} or more, got {number}.")
    return number


def local_path(path: str | os.PathLike[str]) -> Path:
    """Expands "~" in a path, and raises an error for URLs.

    >>> local_path("gs://bucket/run")
    Traceback (most recent call last):
    ValueError: Cannot use the URL 'gs://bucket/run': a path on this machine is needed. Mount ...
    """
    text = os.fspath(path)
    if _URL.match(text):
        raise ValueError(
            f"Cannot use the URL {text!r}: a path on this machine is needed. Mount the store, or "
            "write to a local folder and copy it."
        )
    return Path(path).expanduser()


def check_is_function(owner: str, given: object, name: str) -> None:
    """Checks that `given` is a function, not another library's module with that method."""
    if hasattr(given, name):
        kind = given.__name__ if isinstance(given, type) else type(given).__name__
        advice = f"{kind}(...)" if isinstance(given, type) else f"its {name}"
        raise TypeError(f"{owner} needs a module or its {name}, got {kind}: pass {advice}.")


def check_order(kind: str, function: PyTree) -> None:
    """Checks that a loss or a metric takes outputs first, unlike in other libraries.

    It checks the names of the arguments and the library that the function is from.

    >>> check_order("loss", lambda outputs, targets: outputs - targets)
    >>> check_order("loss", lambda y_true, y_pred: y_pred - y_true)
    Traceback (most recent call last):
    TypeError: flaxfit calls loss(outputs, targets), but this one takes (y_true, y_pred). Wrap ...
    """
    origin = function
    while isinstance(origin, functools.partial):
        origin = origin.func
    library = str(getattr(origin, "__module__", "")).partition(".")[0]
    name = getattr(origin, "__name__", type(origin).__name__)
    if library in _NOT_JAX or (library in _KERAS and hasattr(origin, "update_state")):
        raise TypeError(
            f"JAX traces the {kind}, and it cannot trace {name} of {library}: use a {kind} of "
            "flaxfit by name, or a function (outputs, targets) in jax.numpy."
            + (" On the host: flaxfit.metrics.collected." if kind == "metric" else "")
        )
    names = ["y_true", "y_pred"] if library in _KERAS else _first_two(function)
    _check_names(kind, names)


def check_argument_order(kind: str, function: PyTree) -> None:
    """Checks by the names of its arguments only that a function takes outputs first."""
    _check_names(kind, _first_two(function))


def _check_names(kind: str, names: Sequence[str]) -> None:
    if names and names[0] in _MODELS and names[1] == "batch":
        raise TypeError(
            f"flaxfit calls {kind}(outputs, targets), but this one takes ({', '.join(names)}). "
            "A loss that calls the model is an objective: objective=f, f(apply, batch, rngs) -> "
            "values."
        )
    if names and names[0] in _TARGETS and (names[0] == "y_true" or names[1] in _OUTPUTS):
        raise TypeError(
            f"flaxfit calls {kind}(outputs, targets), but this one takes ({', '.join(names)}). "
            "Wrap it: lambda outputs, targets: f(targets, outputs)."
        )


def _first_two(function: PyTree) -> list[str]:
    """Returns the names of the first two arguments, or [] if they are unknown or fewer."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [each.name for each in parameters(function).values() if each.kind in kinds]
    return names[:2] if len(names) > 1 else []
