"""Checks and normalizes the options of a task."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import optax
from flax.core.scope import in_filter

from flaxfit.display import say
from flaxfit.metrics import Metric
from flaxfit.metrics._metric import why_taken
from flaxfit.modules._patterns import as_patterns, select
from flaxfit.modules._switch import as_apply, check_streams
from flaxfit.optim._extended import extend, generations_of
from flaxfit.optim._groups import MultiOptimizer
from flaxfit.optim._optimizer import Optimizer
from flaxfit.task._companions import as_companions
from flaxfit.task._multi_output import as_loss, is_number
from flaxfit.task._no_loss import no_loss
from flaxfit.task._output_metrics import as_metrics
from flaxfit.task._precision import PRECISIONS
from flaxfit.task._signatures import check_call, takes_ema
from flaxfit.tree import label_of, whole_number


def resolved(task: Any) -> dict[str, Any]:
    """Checks the fields of a `TrainTask`, and returns normalized values."""
    has_own_step, apply = task.step is not None, task.apply
    if has_own_step:
        _check_own_step(task)
        apply = getattr(task.step, "apply", None) if apply is None else apply
    if apply is not None or not has_own_step:
        apply = as_apply("TrainTask", apply, train=True)
    freeze, norms = (as_patterns(n, getattr(task, n), apply) for n in ("freeze", "norms"))
    if len({*map(label_of, norms)}) < len({*norms}):
        raise ValueError(
            f"norms has several filters of one name, {', '.join(map(label_of, norms))}, under "
            "which all their norms would be reported. Give functions distinct names (def)."
        )
    _check_values(task)
    loss = task.loss
    if task.objective is None and loss is None and not has_own_step:
        loss = no_loss
    found = _resolved("TrainTask", task, apply, loss)
    _check_collected(found["metrics"])
    _check_flag("save_companions", task.save_companions)
    if task.save_companions and not found["companions"]:
        raise ValueError("save_companions=True would have no effect: the task has no companions.")
    return {
        **found,
        "freeze": freeze,
        "norms": norms,
        "optimizer": _extended_optimizer(task, freeze, apply),
        "pad": found["pad"] and found["loss"] is not no_loss,
    }


def resolved_for_evaluation(task: Any) -> dict[str, Any]:
    """Checks the fields of an `EvalTask`, and returns normalized values."""
    return _resolved("EvalTask", task, as_apply("EvalTask", task.apply, train=False), task.loss)


def _resolved(owner: str, task: Any, apply: Any, loss: Any) -> dict[str, Any]:
    """Checks the fields that both kinds of tasks have, and returns normalized values."""
    if task.precision not in PRECISIONS:
        raise ValueError(
            f"{owner} cannot compute in precision {task.precision!r}: choose one of {PRECISIONS}."
        )
    if task.across not in (None, "batch"):
        raise ValueError(f"across must be 'batch' or None, got {task.across!r:.60}.")
    _check_flag("penalty_in_loss", task.penalty_in_loss)
    if task.objective is not None:
        _check_objective(task)
    elif loss is not None:
        loss = as_loss(loss, task.loss_weights)
    rngs = (task.rngs,) if isinstance(task.rngs, str) else tuple(task.rngs)
    if task.objective is None:  # An objective may draw from further streams itself.
        check_streams(owner, rngs, apply)
    return {
        "apply": apply,
        "loss": loss,
        "metrics": as_metrics(task.metrics, loss),
        "rngs": rngs,
        "companions": as_companions(owner, task),
        "pad": task.pad and task.across is None,
    }


def _check_values(task: Any) -> None:
    """Checks the options of training that are numbers, words or functions."""
    whole_number("accumulate", task.accumulate)
    if task.clip_norm is not None and not (is_number(task.clip_norm) and task.clip_norm > 0):
        raise ValueError(f"clip_norm must be more than 0, or None, got {task.clip_norm!r}.")
    if task.ema is not None and not (is_number(task.ema) and 0 < task.ema < 1):
        raise ValueError(f"ema must lie between 0 and 1, such as 0.999, got {task.ema!r}.")
    if task.ema_overwrite_frequency is not None:
        whole_number("ema_overwrite_frequency", task.ema_overwrite_frequency)
        if task.ema is None:
            raise ValueError(
                f"ema_overwrite_frequency={task.ema_overwrite_frequency} needs the moving average "
                "that it writes: set ema to its decay, such as ema=0.999."
            )
    if (
        task.penalty_in_loss is True
        and task.mutable is not None
        and not in_filter(task.mutable, "losses")
    ):
        raise ValueError(
            f"penalty_in_loss=True cannot be combined with mutable={task.mutable!r:.60}: the "
            "losses that the model adds would count only in evaluation. Name 'losses' in mutable, "
            "too."
        )
    check_call("grads_hook", task.grads_hook, "grads", "state", "sums", returns="grads")
    check_call("example_grads_hook", task.example_grads_hook, "grads", returns="grads")
    if task.example_grads_hook is not None:
        _check_examples_are_apart(task)
    above = task.skip_above
    if above is not None and not (is_number(above) and above > 0):
        raise ValueError(
            f"skip_above must be a number of standard deviations, such as 6.0, got {above!r}."
        )


def _check_examples_are_apart(task: Any) -> None:
    """Checks that a task with `example_grads_hook` computes a gradient for each example."""
    if task.across is not None or not task.pad:
        option = "pad=False" if task.across is None else f"across={task.across!r}"
        raise ValueError(
            f"{option} computes batches as a whole, but example_grads_hook needs a gradient for "
            "each example: remove one of these options."
        )
    if task.precision == "float16":
        raise ValueError(
            "With precision='float16', example_grads_hook would receive gradients of the scaled "
            "loss: use precision='bfloat16', which needs no scale."
        )


def check_names(reported: Iterable[str]) -> None:
    """Checks the names of the values that an objective reports."""
    for name in reported:
        if why := why_taken(name):
            raise ValueError(f"The objective cannot report {name}: {why}. Use another name.")


def _check_flag(name: str, given: object) -> None:
    if not isinstance(given, bool):
        raise TypeError(f"{name} must be True or False, got {given!r:.60}.")


def _check_collected(metrics: Mapping[str, Metric]) -> None:
    if names := [name for name, metric in metrics.items() if metric.max_rows is not None]:
        raise ValueError(
            f"A TrainTask cannot measure {', '.join(map(repr, names))}: a collected metric needs "
            "the outputs of one model for all examples, and the model changes with each step. "
            "Measure it in evaluation: give it to Model(metrics=...), which measures it on "
            "validation_data and in evaluate(), or put EvalLoop(EvalTask(apply, [metric], data)) "
            "among the callbacks."
        )


def _check_objective(task: Any) -> None:
    """Checks an objective, and the options that cannot be combined with it."""
    is_given_ema = takes_ema(task)
    named = ("ema",) if is_given_ema else ()  # Companions are checked by name.
    arguments = ("apply", "batch", "rngs")
    check_call("objective", task.objective, *arguments, returns="values", named=named)
    if getattr(task, "ema", 1) is None and is_given_ema:
        raise ValueError(
            "The objective has a parameter ema, but the task keeps no moving average of its "
            "parameters: set ema to its decay, such as ema=0.99."
        )
    if task.loss is not None:
        raise ValueError(
            "Give either a loss or an objective: an objective computes the loss by itself."
        )
    if hasattr(task, "optimizer") and task.metrics:
        raise ValueError(
            "metrics would have no outputs to measure, since the objective calls the model itself: "
            "return them as its aux. Model(..., metrics=...) measures them in evaluation."
        )
    if task.penalty_in_loss:
        raise ValueError(
            "penalty_in_loss=True is for a loss of the outputs, but the objective calls the model "
            "itself: add the penalty to its values, which are the reported loss."
        )
    if task.across is not None:
        raise ValueError(
            "across='batch' is for a loss of the outputs, but the objective calls the model "
            "itself: give a loss, or pad=False with one device or strategy=Sharded(). On several "
            "devices an objective may gather their rows: jax.lax.all_gather(x, 'replica', "
            "tiled=True)."
        )


def _check_own_step(task: Any) -> None:
    if not callable(task.step):
        raise TypeError(f"step must be (state, batch) -> (state, sums), got {task.step!r:.80}.")
    names = {"objective", "across", "freeze", "accumulate", "precision", "clip_norm", "ema"}
    names |= {"skip_nonfinite", "skip_above", "grads_hook", "example_grads_hook", "norms"}
    names |= {"companions", "save_companions", "ema_overwrite_frequency", "penalty_in_loss"}
    fields = [field for field in dataclasses.fields(task) if field.name in names]
    wrong = [
        field.name for field in fields if getattr(task, field.name) not in (field.default, [], {})
    ]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)} would have no effect: the task has a custom step. Implement it in "
            "the step or in its optimizer."
        )


def _extended_optimizer(
    task: Any, freeze: Sequence[str], apply: object
) -> optax.GradientTransformation:
    """Wraps the optimizer of a task for its options, such as `freeze`, `clip_norm` and `ema`."""
    given, own = task.optimizer, getattr(task.step, "optimizer", None)
    if given is None and task.step is not None:
        given = optax.identity() if own is None else own
    if own is not None and given is not own:
        raise ValueError(
            "The step has the optimizers given to nnx_step: remove the task's optimizer."
        )
    if hasattr(given, "tx") and hasattr(given, "wrt"):
        given = _transformation_of(given)
    is_optimizer = hasattr(given, "init") and hasattr(given, "update")
    if not is_optimizer and not isinstance(given, Optimizer):
        advice = ""
        if isinstance(given, str):
            advice = " Strings are not accepted: call the function."
        elif callable(given) and hasattr(given, "__name__"):
            advice = f" Call it: {given.__name__}(learning_rate)."
            if "schedule" in given.__qualname__:
                advice = " Pass a schedule as the rate of an optimizer: optax.adam(schedule)."
        raise TypeError(
            "The optimizer must be an Optax transformation, such as optax.adam(1e-3), got "
            f"{given!r:.80}.{advice}"
        )
    user = getattr(given, "optimizer_def", given)
    user = getattr(user, "user", user)  # `dataclasses.replace` passes an already wrapped one.
    if isinstance(user, MultiOptimizer):
        user = user.with_patterns(
            lambda filter: select("MultiOptimizer", filter, apply, collection="params")
        )
    return extend(
        user,
        clip_norm=task.clip_norm,
        freeze=freeze,
        ema=task.ema,
        ema_overwrite_frequency=task.ema_overwrite_frequency,
        scales_loss=task.precision == "float16",
        keeps_recent=task.skip_above is not None,
        generations=generations_of(given),
    )


def _transformation_of(optimizer: Any) -> optax.GradientTransformation:
    """Returns the transformation of an `nnx.Optimizer`."""
    from flax import nnx

    if (wrt := optimizer.wrt) is not nnx.Param:
        raise ValueError(
            f"The nnx.Optimizer trains wrt={wrt!r}, but a task trains all parameters that are not "
            "frozen: pass optimizer.tx, and freeze=nnx.Not(...) with the filter to train."
        )
    _say_tx()
    return optimizer.tx


@functools.cache
def _say_tx() -> None:
    say(
        "the optimizer is an nnx.Optimizer: its transformation, optimizer.tx, trains the model; "
        "its own state has no effect"
    )
