"""The order of arguments: losses and metrics take outputs first, not as in other libraries."""

import functools
import inspect
from typing import Any

_TARGETS = {"actual", "expected", "ground_truth", "label", "labels", "target", "targets"}
_TARGETS |= {"true", "truth", "y", "y_true"}
_OUTPUTS = {"logit", "logits", "output", "outputs", "pred", "predicted", "prediction"}
_OUTPUTS |= {"predictions", "preds", "score", "scores", "y_hat", "y_pred", "y_score", "yhat"}
_OUTSIDE_OF_JAX = ("sklearn", "tensorflow", "torch", "torchmetrics")
_KERAS = ("keras", "tf_keras")


def check_order(kind: str, function: Any) -> None:
    """Checks that a loss or a metric takes outputs first, as far as its names and its origin tell.

    >>> check_order("loss", lambda outputs, targets: outputs - targets)
    >>> check_order("loss", lambda y_true, y_pred: y_pred - y_true)
    Traceback (most recent call last):
    TypeError: flaxfit calls loss(outputs, targets), and this one takes (y_true, y_pred). Wrap ...

    Args:
      kind: "loss" or "metric".
      function: what was passed as one.

    Raises:
      TypeError: it takes the targets first, or cannot be traced by JAX.
    """
    origin = function
    while isinstance(origin, functools.partial):
        origin = origin.func
    library = str(getattr(origin, "__module__", "")).partition(".")[0]
    name = getattr(origin, "__name__", type(origin).__name__)
    if library in _OUTSIDE_OF_JAX or (library in _KERAS and hasattr(origin, "update_state")):
        raise TypeError(
            f"A {kind} is traced by JAX, which cannot look into {name} of {library}: use one of "
            "flaxfit by name, or a function (outputs, targets) in jax.numpy."
        )
    names = _first_two(function)
    if library in _KERAS:
        names = ["y_true", "y_pred"]
    if names and names[0] in _TARGETS and (names[0] == "y_true" or names[1] in _OUTPUTS):
        raise TypeError(
            f"flaxfit calls {kind}(outputs, targets), and this one takes ({', '.join(names)}). "
            "Wrap it: lambda outputs, targets: f(targets, outputs)."
        )


def _first_two(function: Any) -> list[str]:
    """The names of the first two arguments; empty if there are fewer or they are unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [each.name for each in parameters if each.kind in kinds]
    return names[:2] if len(names) > 1 else []
