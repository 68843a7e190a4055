"""Recipe: the arguments of a model, and the training and evaluation tasks made from them."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import optax
from flax.core.scope import in_filter

from flaxfit import modules
from flaxfit.display import say
from flaxfit.modules import ModelFunctions
from flaxfit.task import EvalTask, TrainTask, as_loss, as_metrics, objective_in_evaluation
from flaxfit.tree import ApplyFn, Array, PyTree


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The arguments of a `Model`; `compile` replaces some of them."""

    module: Any
    losses: Any
    training: ModelFunctions
    evaluation: ModelFunctions
    optimizer: Any
    loss: Any
    metrics: Any
    eval_rngs: str | Sequence[str]
    options: Mapping[str, Any]
    """The options of the `TrainTask`."""

    @property
    def lacks(self) -> list[str]:
        """The parts that must be given before the model can be trained."""
        if self.optimizer is not None or self.options.get("step") is not None:
            return []  # `TrainTask` itself refuses a missing loss.
        has_loss = self.loss is not None or self.options.get("objective") is not None
        return ["optimizer"] if has_loss else ["optimizer", "loss"]

    def changed(self, changes: Mapping[str, Any], options: Mapping[str, Any]) -> "Recipe":
        """Returns a copy with these options, and with those changes that are not None."""
        given = {name: value for name, value in changes.items() if value is not None}
        own = dict(self.options)
        if "loss" in given:
            own.pop("loss_weights", None)
        return dataclasses.replace(self, **given, options=own | checked_options(options))

    def of_module_as_it_is(self) -> "Recipe":
        """Returns a copy with new functions of the module, after a change of its attributes."""
        training, evaluation = modules.train_and_eval(self.module, losses=self.losses)
        return dataclasses.replace(self, training=training, evaluation=evaluation)

    def tasks(self) -> tuple[TrainTask, EvalTask]:
        """Returns the tasks to train the model and to evaluate it."""
        lacks = self.lacks
        loss, optimizer = self.loss, optax.identity() if lacks else self.optimizer
        options = self.options
        resolved = None if loss is None else as_loss(loss, options.get("loss_weights"))
        every = as_metrics(self.metrics, resolved)
        summed = {name: metric for name, metric in every.items() if metric.max_rows is None}
        # An objective calls the model itself, so training has no outputs to measure.
        measured = {} if options.get("objective") else summed
        to_train = _no_loss if "loss" in lacks else loss
        task = TrainTask(self.training.apply, optimizer, to_train, None, measured, **options)
        if collected := tuple(name for name in every if name not in summed):
            _say_collected(collected)
        eval_task = EvalTask(
            self.evaluation.apply,
            every,
            loss=None if "loss" in lacks else task.loss,
            loss_weights=task.loss_weights,
            inputs=task.inputs,
            targets=task.targets,
            weights=task.weights,
            objective=objective_in_evaluation(task),
            companions=task.companions,
            rngs=self.eval_rngs,
            precision=task.precision,
            pad=task.pad,
            across=task.across,
            penalty_in_loss=task.penalty_in_loss,
            check_finite=task.check_finite,
        )
        return task, eval_task


def make_recipe(
    module: Any,
    optimizer: Any,
    loss: Any,
    metrics: Any,
    *,
    losses: Any,
    eval_rngs: str | Sequence[str],
    options: Mapping[str, Any],
) -> Recipe:
    """Returns the recipe of a model; the arguments are those of `Model`."""
    options = checked_options(options)
    mutable = options.get("mutable")
    if losses and mutable is not None and not in_filter(mutable, "losses"):
        raise ValueError(
            f"losses={losses!r:.60} cannot be combined with mutable={mutable!r:.60}: the values "
            "that the model adds to the loss would be lost. Name 'losses' and their collections "
            "in mutable, or remove mutable."
        )
    training, evaluation = modules.train_and_eval(module, losses=losses)
    return Recipe(
        module, losses, training, evaluation, optimizer, loss, metrics, eval_rngs, options
    )


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given options of `TrainTask`; an unknown option is a TypeError."""
    known = [field.name for field in dataclasses.fields(TrainTask) if field.kw_only]
    unknown = [name for name in options if name not in known]
    of_keras = [name for name in unknown if name in _ELSEWHERE]
    for name in of_keras:
        default, hint = _ELSEWHERE[name]
        if options[name] not in default:
            raise TypeError(f"Model does not support {name}={options[name]!r:.60}: {hint}.")
    if unknown := [name for name in unknown if name not in of_keras]:
        raise TypeError(
            f"Model has no option {', '.join(unknown)}: it takes {', '.join(known)}. Pass "
            "optimizer options to the optimizer, such as optax.adam(learning_rate=1e-3)."
        )
    return {name: value for name, value in options.items() if name in known}


def apply_to_export(task: EvalTask) -> ApplyFn:
    """Returns the `apply` of an evaluation task; raises if it draws random numbers."""
    if task.rngs:
        raise ValueError(
            f"Cannot export a model that draws random numbers (eval_rngs={task.rngs}): an exported "
            "program is a function of the inputs alone. Make a Model without eval_rngs, of a "
            "module that draws none in evaluation, and load the weights with load_weights."
        )
    return task.apply


_ELSEWHERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "weighted_metrics": ((None,), "sample_weight applies to all metrics: pass them as metrics"),
    "steps_per_execution": ((1, "auto", None), "it is an argument of fit"),
    "jit_compile": (("auto", True, None), "every step is compiled; see run_eagerly of Model"),
    "auto_scale_loss": ((True, None), "precision='float16' always scales the loss"),
    "run_eagerly": ((False, None), "it is an argument of Model, which cannot be changed later"),
}
"""Arguments of Keras's `compile`: the accepted values without effect, and advice for others."""


def _no_loss(*outputs_and_targets: PyTree) -> Array:
    raise AssertionError("a model without a loss was trained")


@functools.cache
def _say_collected(names: tuple[str, ...]) -> None:
    say(
        f"{', '.join(names)}: measured on validation data and by evaluate(), not in training, as "
        "it takes the outputs of one model for all examples"
    )
