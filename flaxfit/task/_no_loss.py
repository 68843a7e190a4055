"""The loss that a model adds itself: the whole loss, or a penalty besides another loss."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from flaxfit.tree import Array, PyTree, Sums, by_row


@by_row
def no_loss(*outputs_and_targets: PyTree) -> Array:
    """Returns 0; replaces `loss=None`, where the model's penalty is the whole loss."""
    return jnp.zeros(())


def as_all_loss(loss: object, sums: dict[str, Sums], penalty: Array | None) -> dict[str, Sums]:
    """Makes the penalty the loss of a batch's sums, if the task has no other loss."""
    if loss is not no_loss or penalty is None:
        return sums
    _, weight = sums["loss"]
    return sums | {"loss": (jnp.where(weight > 0, weight * penalty, 0), weight)}


def with_penalty(task: Any, sums: dict[str, Sums]) -> dict[str, Sums]:
    """Adds the penalty to the loss of a batch's sums, if the task has `penalty_in_loss`.

    The loss is then a mapping of pairs, whose value is the sum of their means.
    """
    if not task.penalty_in_loss or "penalty" not in sums or task.loss is no_loss:
        return sums
    loss = sums["loss"]
    parts = loss if isinstance(loss, Mapping) else {"loss": loss}
    return sums | {"loss": {**parts, _PENALTY: sums["penalty"]}}


_PENALTY = ""
"""A name that no output has."""


def check_adds_loss(task: object, penalty: object) -> None:
    """Checks that the model of a task without a loss adds one itself."""
    if getattr(task, "loss", None) is not no_loss or penalty is not None:
        return
    if not hasattr(task, "optimizer"):
        raise TypeError(
            "There is no loss to measure: the task has none, and the model adds none in "
            "evaluation. Let the model add its loss there too, give loss=, or measure the metrics "
            "alone: EvalLoop(EvalTask(apply, metrics, data))."
        )
    raise TypeError(
        "A task needs loss= (such as 'crossentropy' or a function (*outputs, *targets) -> "
        "values), objective= or step=. Otherwise the model must add its own loss, and this one "
        "adds none: a Linen module does so by self.sow('losses', name, value), an NNX module by a "
        "variable of a type in losses=."
    )
