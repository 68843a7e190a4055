"""The loss that a model adds itself: all of the loss, or a penalty beside another."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from flaxfit.tree import Array, PyTree, Sums, by_row


@by_row
def no_loss(*outputs_and_targets: PyTree) -> Array:
    """0: what stands for `loss=None`, where the penalty of the model is all that is trained."""
    return jnp.zeros(())


def as_all_loss(loss: object, sums: dict[str, Sums], penalty: Array | None) -> dict[str, Sums]:
    """The sums of a batch, in which the penalty is the loss if there is no other."""
    if loss is not no_loss or penalty is None:
        return sums
    _, weight = sums["loss"]
    return sums | {"loss": (jnp.where(weight > 0, weight * penalty, 0), weight)}


def with_penalty(task: Any, sums: dict[str, Sums]) -> dict[str, Sums]:
    """The sums of a batch, whose loss has the penalty as one more part if the task reports it so.

    The value of a loss in parts is the sum of their means.
    """
    if not task.penalty_in_loss or "penalty" not in sums or task.loss is no_loss:
        return sums
    loss = sums["loss"]
    parts = loss if isinstance(loss, Mapping) else {"loss": loss}
    return sums | {"loss": {**parts, _PENALTY: sums["penalty"]}}


_PENALTY = ""
"""A name that no output has."""


def check_adds_loss(task: object, penalty: object) -> None:
    """Checks that a model without a loss adds one itself, in training or in evaluation."""
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
