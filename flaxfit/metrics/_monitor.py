"""Which values of a metric are better, and the metric that a callback monitors."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import optax

from flaxfit.losses._names import is_loss
from flaxfit.metrics._aliases import known_as
from flaxfit.tree import Function, order_of, owner_of

# Metrics with a known direction, by name; losses also have one.
_HIGHER = re.compile(
    r"(binary_|balanced_)?accuracy|exact_match|precision|recall|specificity|negative_predictive_value"
    r"|f1|fbeta|dice|(mean_|binary_)?iou|mcc|cohen_kappa|true_(positives|negatives)|(pr_)?auc"
    r"|average_precision|(precision|recall|sensitivity|specificity)_at_[a-z]+"
    r"|r2|explained_variance|pearson|concordance|spearman|kendall|d2_[a-z_]+|cosine_similarity"
    r"|ndcg|dcg|mrr|map|hit_rate|top_?\d+(_accuracy)?|bleu|rouge_[12l]|psnr|ssim"
)
_LOWER = re.compile(
    r"hamming_loss|false_(positive|negative)(s|_rate)|perplexity|log_loss|brier|calibration_error"
    r"|zero_one_loss|mean_poisson_deviance|mse|r?msle|mae|rmse|s?mape|max_error|median_absolute_error|quantile_loss|wer|cer"
)
_AVERAGED = re.compile(r"(.+)_(binary|macro|micro|weighted|samples|at_\d+)")
RESERVED = (
    "loss",
    "grad_norm",
    "hooked_grad_norm",
    "penalty",
    "skipped_steps",
    "learning_rate",
)
"""The names under which a loop reports its own numbers."""
# Numbers that a loop may report besides its loss and the metrics of the task.
_MAY_BE_THERE = {*RESERVED, "param_norm"} - {"loss"}

Modes = Mapping[str, str | None]
"""The direction of each metric by name: "min", "max", or None if unknown."""


def mode_of(values: Function | None, name: str | None) -> str | None:
    """Returns "min" or "max" for a metric with a known direction, else None.

    The mean of a loss of flaxfit or Optax is minimized, whatever the metric is called.

    >>> mode_of(optax.huber_loss, "size"), mode_of(None, "top_3"), mode_of(None, "length")
    ('min', 'max', None)
    """
    if is_loss(values):
        return "min"
    if values is optax.cosine_similarity:
        return "max"
    known = known_as(name or "")
    if averaged := _AVERAGED.fullmatch(known):
        known = averaged[1]
    if _HIGHER.fullmatch(known):
        return "max"
    return "min" if _LOWER.fullmatch(known) or is_loss(known) or is_loss(name) else None


def known_mode(name: str, modes: Modes | None = None) -> str | None:
    """Returns "min" or "max" for the name of a metric with a known direction, else None.

    Known are the entries of `modes`, every loss ("loss", "val_loss", "head_loss"), and the metrics
    and losses of flaxfit and Optax, with or without "val_".

    >>> known_mode("val_loss"), known_mode("val_accuracy"), known_mode("regret")
    ('min', 'max', None)
    """
    if mode := (modes or {}).get(name):
        return mode
    bare = name.removeprefix("val_")
    is_any_loss = re.split("[_/]", bare)[-1] in ("loss", "penalty")
    return "min" if is_any_loss else mode_of(None, bare)


def resolve_mode(name: str, mode: str = "auto", modes: Modes | None = None) -> str:
    """Returns the given mode, "min" or "max", or for "auto" the known direction of the metric."""
    check_mode(mode)
    found = known_mode(name, modes) if mode == "auto" else mode
    if found is None:
        raise ValueError(
            f"Cannot tell whether lower or higher values of {name!r} are better: pass "
            "mode='min' or mode='max'."
        )
    return found


def check_mode(mode: str) -> None:
    """Checks that a mode is "auto", "min" or "max"."""
    if mode not in ("auto", "min", "max"):
        raise ValueError(f"mode must be 'auto', 'min' or 'max', got {mode!r}.")


def is_better(value: float, best: float | None, mode: str, min_delta: float = 0.0) -> bool:
    """Returns whether a value beats the best one so far by more than `min_delta`.

    A value that is not finite never does; any finite value beats None.
    """
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return best - value > min_delta if mode == "min" else value - best > min_delta


def default_monitor(names: Iterable[str], modes: Modes | None = None) -> str | None:
    """Returns the first validation metric of known mode, else `val_loss` if there is one.

    >>> default_monitor(["loss", "accuracy", "val_loss", "val_accuracy"])
    'val_accuracy'
    >>> default_monitor(["loss", "accuracy"])
    """
    validation = [name for name in names if name.startswith("val_") and known_mode(name, modes)]
    return next((name for name in validation if name != "val_loss"), next(iter(validation), None))


def modes_of(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, str | None]:
    """Returns the directions of metrics by prefixed name."""
    return {f"{prefix}{name}": metric.mode or known_mode(name) for name, metric in metrics.items()}


class Monitor:
    """The metric that a callback monitors; errors name the callback.

    >>> from flaxfit.state._checkpoint import Checkpoint
    >>> monitor = Monitor("val_loss", "auto", "Mine")
    >>> value = monitor.read(Checkpoint(step=1, state=None, metrics={"val_loss": 0.4}))
    >>> value, monitor.is_better(value, 0.5)
    (0.4, True)
    """

    def __init__(
        self,
        name: str,
        mode: str,
        owner: str,
        use: str = "monitor",
        advice: str = "Pass monitor= one of these.",
    ) -> None:
        check_mode(mode)
        self.name, self.mode, self._owner = name, mode, owner
        self._use, self._advice = use, advice
        self.was_seen = False
        """Whether some checkpoint has the metric; then checkpoints without it are skipped."""
        self._modes: Modes = {}

    def attach(self, loop: Any, callback: object) -> None:
        """Checks, before the first step, that a callback of a loop can monitor the metric."""
        self._modes, is_complete = _metrics_before(loop, callback)
        self.was_seen = self.name in self._modes
        if is_complete and not (self.was_seen or _may_come(self.name, self._modes)):
            raise self._no_metric("will hold", self._modes)
        self.resolve()

    def resolve(self, modes: Modes | None = None) -> str:
        """Returns "min" or "max", with what a checkpoint knows of its metrics."""
        self._modes = {**self._modes, **(modes or {})}
        try:
            return resolve_mode(self.name, self.mode, self._modes)
        except ValueError as error:
            raise ValueError(f"{self._owner}: {error}") from None

    def read(self, checkpoint: Any) -> float | None:
        """Returns the value in a checkpoint; None if only other checkpoints have one.

        Raises:
          ValueError: no checkpoint has the metric, or its better values are not known.
        """
        if self.name in checkpoint.metrics:
            self.was_seen = True
            self.resolve(checkpoint.modes)
            return float(checkpoint.metrics[self.name])
        if self.was_seen:
            return None
        raise self._no_metric("hold", checkpoint.metrics)

    def is_better(self, value: float, best: float | None, min_delta: float = 0.0) -> bool:
        """Returns whether a value beats the best one so far by more than `min_delta`."""
        return is_better(value, best, self.resolve(), min_delta)

    def _no_metric(self, hold: str, names: Iterable[str]) -> ValueError:
        names = list(names)
        is_validated = any(name.startswith("val_") for name in names)
        advice = ""
        if self.name.startswith("val_") and not is_validated:
            advice = " Validation metrics need validation_data in fit, or an EvalLoop before it."
        elif self.name == "val_loss":
            advice = " Give the task of the EvalLoop a loss: EvalTask(..., loss=...)."
        elif near := difflib.get_close_matches(self.name, names, 1, 0.5):
            advice = f" Did you mean {near[0]!r}?"
        return ValueError(
            f"{self._owner} cannot {self._use} {self.name!r}: the checkpoints {hold} "
            f"{', '.join(names) or 'no metrics'}. {self._advice}{advice}"
        )


def _may_come(name: str, known: Modes) -> bool:
    """Returns whether a loop may report this metric, too, such as the penalty of a loss."""
    is_penalty = name.endswith("_penalty") and f"{name.removesuffix('penalty')}loss" in known
    return is_penalty or name.partition("/")[0] in _MAY_BE_THERE


def _metrics_before(loop: Any, callback: object) -> tuple[dict[str, str | None], bool]:
    """Returns the modes of the metrics that a callback will find, and whether these are all.

    The library's callbacks declare added metrics in `adds`, and further ones by `adds_more`. The
    metrics of other callbacks, and of a user's own step or objective, are unknown.
    """
    task = getattr(loop, "task", None)
    if task is None:  # Not a `TrainLoop`.
        return {}, False
    is_own_step = task.step is not None
    known = modes_of(task.metrics) if is_own_step else {"loss": "min", **modes_of(task.metrics)}
    is_complete = not is_own_step and task.objective is None
    for each in map(owner_of, loop.callbacks):
        if each is callback and order_of(callback) != "last":
            break
        known |= getattr(each, "adds", {})
        is_complete &= str(getattr(each, "__module__", "")).startswith("flaxfit.")
        is_complete &= not getattr(each, "adds_more", False)
    return known, is_complete
