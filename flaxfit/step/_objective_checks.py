"""Checks whether an objective combines examples that are computed elsewhere, or padding."""

from typing import Any

import jax

from flaxfit.data._batch import Batch, n_examples
from flaxfit.step._batch_loss import how_divided, sees_replicas
from flaxfit.step._broadcasting import couples_rows
from flaxfit.step._replicas import AnyReplicas, VirtualReplicas
from flaxfit.task._signatures import takes_ema
from flaxfit.task._task import EvalTask, TrainTask
from flaxfit.tree._types import Function, PyTree, Rngs


def replayed(task: TrainTask | EvalTask, rngs: Rngs) -> Function:
    """An objective as a function of the outputs of its calls, and those of companions, and a batch.

    It returns what the objective does, and the inputs of the calls.
    """

    objective: Any = task.objective

    def function(*outputs_and_batch: PyTree) -> tuple[Any, list[PyTree]]:
        *outputs, batch = outputs_and_batch
        seen: list[PyTree] = []

        def apply(*inputs: PyTree, rngs: Rngs | None = None, **named: PyTree) -> PyTree:
            seen.append((inputs, named))
            return outputs[len(seen) - 1]

        def ema(*inputs: PyTree, **options: PyTree) -> PyTree:
            return jax.lax.stop_gradient(apply(*inputs, **options))

        named = dict.fromkeys(task.companions, apply) | ({"ema": ema} if takes_ema(task) else {})
        return objective(apply, batch, rngs, **named), seen

    return function


def _combines_examples(
    task: TrainTask | EvalTask, outputs: tuple[PyTree, ...], batch: Batch, rngs: Rngs
) -> bool:
    """Whether an objective combines the examples of a batch, apart from what models do."""
    function = replayed(task, rngs)

    def values_and_inputs(*outputs_and_batch: PyTree) -> PyTree:
        found, inputs = function(*outputs_and_batch)
        return [found[0] if isinstance(found, tuple) else found, inputs]

    return couples_rows(values_and_inputs, outputs, (batch,))


def check_by_example(
    task: TrainTask | EvalTask,
    outputs: tuple[PyTree, ...],
    batch: Batch,
    rngs: PyTree,
    replicas: AnyReplicas,
    *,
    n_parts: int = 1,
) -> None:
    """Checks that an objective combines no examples that are computed elsewhere, nor padding."""
    divided = how_divided(replicas, n_parts)
    has_weights = batch.weights is not None and bool(jax.tree.leaves(batch.targets))
    is_replaced = not task.pad and has_weights and isinstance(task, TrainTask)
    if not (task.pad or divided or is_replaced):
        return
    if not _combines_examples(task, outputs, batch, rngs):
        return
    if is_replaced:
        raise ValueError(
            "This objective compares the examples of a batch, and targets of weight 0 are "
            "replaced, as they may be invalid: the others would be compared with wrong ones. Pass "
            "what it compares as inputs, which are kept, or leave the examples of weight 0 out of "
            "the data."
        )
    is_by_device = n_parts == 1 and not isinstance(replicas, VirtualReplicas)
    if not task.pad and is_by_device and sees_replicas(replayed(task, rngs), outputs, (batch,)):
        return
    where = f"with {divided}" if divided else "with batches that may be padded"
    _check_rows(outputs, n_examples(batch), where)
    raise ValueError(
        f"Cannot compute this objective {where}: the value of an example depends on the other "
        "examples of the batch, or on their number. Return one value per example, which "
        "depends on that example alone. Or compute batches whole: pad=False, one device or "
        "strategy=Sharded(), without accumulate and virtual_replicas. With pad=False an objective "
        "may also gather the rows of all devices itself: "
        "jax.lax.all_gather(x, 'replica', tiled=True)."
    )


def _check_rows(outputs: tuple[PyTree, ...], n: int, where: str) -> None:
    """Checks that each call was of the whole batch, before examples are said to be combined."""
    for each in outputs:
        shapes = [leaf.shape for leaf in jax.tree.leaves(each)]
        if shapes and all(shape[:1] != (n,) for shape in shapes):
            raise ValueError(
                f"Cannot compute this objective {where}: a call in it returned outputs of shape "
                f"{shapes[0]} for a batch of {n} examples, so that nothing shows which example a "
                "value depends on. Call apply on the whole batch, apply(*batch.inputs), not on one "
                "example at a time, as by jax.vmap or jax.lax.map. Or compute batches whole: "
                "pad=False, one device or strategy=Sharded(), without accumulate and "
                "virtual_replicas."
            )
