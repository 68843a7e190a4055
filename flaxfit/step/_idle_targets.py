"""Checks that no loss compares examples with targets of weight 0, which a step replaces."""

from collections.abc import Callable, Mapping

import jax

from flaxfit.data._batch import Batch
from flaxfit.step._batch_loss import losses_by_row
from flaxfit.step._compare import ForwardPass, weights_of
from flaxfit.task._precision import in_float32
from flaxfit.task._task import EvalTask, TrainTask
from flaxfit.tree._types import Function


def check_keeps_targets(
    task: TrainTask | EvalTask,
    result: ForwardPass,
    batch: Batch,
    bind: Function,
    couples: Callable[..., bool],
) -> None:
    """Checks that no loss compares examples with targets of weight 0, which are replaced.

    Where batches may be padded, a loss that compares examples was refused.
    """
    if task.pad or task.loss is None or batch.weights is None:
        return
    is_by_output = isinstance(weights_of(batch, task.loss), Mapping)
    if not is_by_output and (task.across is not None or isinstance(task, EvalTask)):
        return
    way_out = "Pass one weight per example" if is_by_output else "Set across='batch' in the task"
    targets = in_float32(batch.targets)
    for owner, function, *arguments in losses_by_row(task.loss, result.outputs, targets):
        if jax.tree.leaves(arguments[1]) and couples(bind(function), *arguments):
            raise ValueError(
                f"{owner} compares the examples of a batch, and targets of weight 0 are replaced, "
                f"as they may be invalid: the others would be compared with wrong ones. {way_out}, "
                "which keeps all targets, or leave the examples of weight 0 out of the data."
            )
