"""The tasks of a model: what it trains and what it evaluates."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from flax.core.scope import in_filter

from flaxfit import modules
from flaxfit.display import say
from flaxfit.task._multi_output import as_loss, as_metrics
from flaxfit.task._signatures import objective_in_evaluation
from flaxfit.task._task import EvalTask, TrainTask
from flaxfit.tree._types import InitFn


def make_tasks(
    module: Any,
    optimizer: Any,
    loss: Any,
    metrics: Any,
    *,
    losses: Any,
    eval_rngs: str | Sequence[str],
    options: Mapping[str, Any],
) -> tuple[InitFn, TrainTask, EvalTask]:
    """Returns the `init` of a module and the tasks to train and to evaluate it; see `Model`."""
    known = [field.name for field in dataclasses.fields(TrainTask) if field.kw_only]
    if unknown := [name for name in options if name not in known]:
        raise TypeError(
            f"Model has no option {', '.join(unknown)}: it takes {', '.join(known)}. Pass what "
            "concerns the optimizer to the optimizer, such as optax.adam(learning_rate=1e-3)."
        )
    mutable = options.get("mutable")
    if losses and mutable is not None and not in_filter(mutable, "losses"):
        raise ValueError(
            f"losses={losses!r:.60} and mutable={mutable!r:.60} exclude each other: the values "
            "that the model adds to the loss would be lost. Name 'losses' and their collections "
            "in mutable, or leave mutable out."
        )
    training, evaluation = modules.train_and_eval(module, losses=losses)
    resolved = None if loss is None else as_loss(loss, options.get("loss_weights"))
    every = as_metrics(metrics, resolved)
    summed = {name: metric for name, metric in every.items() if metric.max_rows is None}
    measured = {} if options.get("objective") else summed  # It calls the model by itself.
    task = TrainTask(training.apply, optimizer, loss, None, measured, **options)
    if collected := tuple(name for name in every if name not in summed):
        _say_collected(collected)
    eval_task = EvalTask(
        evaluation.apply,
        every,
        loss=task.loss,
        inputs=task.inputs,
        targets=task.targets,
        weights=task.weights,
        objective=objective_in_evaluation(task),
        companions=task.companions,
        rngs=eval_rngs,
        precision=task.precision,
        pad=task.pad,
        across=task.across,
        check_finite=task.check_finite,
    )
    return training.init, task, eval_task


@functools.cache
def _say_collected(names: tuple[str, ...]) -> None:
    say(
        f"{', '.join(names)}: measured on validation data and by evaluate(), not in training, as "
        "it takes the outputs of one model for all examples"
    )
