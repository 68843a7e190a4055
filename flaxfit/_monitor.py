"""Which metric to watch, and when one of its values is better than another."""

import math
from collections.abc import Iterable, Mapping

_MINIMISED = ("loss", "error", "mse", "mae", "rmse", "perplexity")


def resolve_mode(name: str, mode: str = "auto") -> str:
    """Whether a metric is to be minimised ("min") or maximised ("max").

    "auto" minimises names that contain loss, error, mse, mae, rmse or perplexity.

    >>> resolve_mode("val_loss"), resolve_mode("val_accuracy"), resolve_mode("regret", "min")
    ('min', 'max', 'min')
    """
    if mode not in ("auto", "min", "max"):
        raise ValueError(f"mode must be 'auto', 'min' or 'max', got {mode!r}.")
    if mode != "auto":
        return mode
    return "min" if any(word in name.lower() for word in _MINIMISED) else "max"


def is_better(value: float, best: float | None, mode: str, min_delta: float = 0.0) -> bool:
    """Whether a value beats the best one so far by more than `min_delta`.

    A value that is not finite never does; any finite value beats None. A tie does not.

    >>> is_better(0.4, 0.5, "min"), is_better(0.5, 0.5, "min"), is_better(0.4, None, "max")
    (True, False, True)
    """
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return best - value > min_delta if mode == "min" else value - best > min_delta


def default_monitor(names: Iterable[str]) -> str | None:
    """The metric to watch when none is named: the first validation metric, else its loss.

    >>> default_monitor(["loss", "accuracy", "val_loss", "val_accuracy"])
    'val_accuracy'
    >>> default_monitor(["loss", "accuracy"])
    """
    validation = [name for name in names if name.startswith("val_")]
    return next((name for name in validation if name != "val_loss"), next(iter(validation), None))


def read_metric(metrics: Mapping[str, float], name: str, reader: str) -> float:
    """The value of a metric, or an error that says what there is."""
    if name in metrics:
        return float(metrics[name])
    available = ", ".join(metrics) or "no metrics"
    advice = (
        " Validation metrics need an EvalLoop before it (or validation_data in fit)"
        " that runs at the same checkpoints."
        if name.startswith("val_")
        else ""
    )
    raise ValueError(
        f"{reader} cannot monitor {name!r}: the checkpoint holds {available}. "
        f"Pass monitor= one of these.{advice}"
    )
