"""The loss of a batch that is divided among replicas, or an error if the parts do not suffice."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit import losses
from flaxfit.data._batch import Batch, n_examples
from flaxfit.data._sample_weights import without_idle_rows
from flaxfit.losses._checks import in_range
from flaxfit.step._jaxpr import names_axis
from flaxfit.step._replicas import AnyReplicas, VirtualReplicas
from flaxfit.task import (
    EvalTask,
    LossByOutput,
    TrainTask,
    in_float32,
    is_loss_of_output,
    no_loss,
    weight_of,
)
from flaxfit.tree import Function, PyTree, beside, is_by_row

Outputs = tuple[PyTree, ...]


class LossResult(NamedTuple):
    """The results of a loss for the examples of a replica."""

    values: Any = None
    """`(batch, ...)`, or a scalar; None if there is no loss."""
    weights: PyTree = None
    """The weights that the loss returned: an array, a mapping by output, or None."""
    penalty: PyTree = None
    """A scalar, or None."""


def loss_of(
    task: TrainTask | EvalTask,
    outputs: Outputs,
    batch: Batch,
    replicas: AnyReplicas,
    *,
    rows_of: Callable[[], PyTree] | None = None,
) -> LossResult:
    """Computes the loss of the examples of this replica.

    The mean over parts equals the loss of the batch only if each example has its own value. Any
    other loss receives the outputs and targets of all replicas. `rows_of()` returns a mask of the
    outputs with an axis of examples; without it, the size of the first axis decides.

    Raises:
      TypeError: the loss returned neither an array nor a tuple of arrays.
      ValueError: its shape is not that of a loss, or the loss needs rows that no replica sees.
    """
    n = n_examples(batch)
    is_training = isinstance(task, TrainTask)
    n_parts = task.accumulate if is_training and task.across is None else 1
    may_gather = n_parts == 1 and not isinstance(task.loss, LossByOutput)
    result = _evaluate_loss(task, outputs, batch.targets, n)
    divided = _how_divided(replicas, n_parts)
    # With padding, or if it cannot gather, a trial checks that the examples are independent in it.
    is_tried = task.pad or not may_gather or isinstance(replicas, VirtualReplicas)
    reason = divided and _why_whole(task, result, outputs, batch.targets, is_tried=is_tried)
    if divided and not reason and task.across is not None:
        reason = "it is declared to compare the examples of a batch"
    if not reason:
        return result
    if isinstance(replicas, VirtualReplicas) or not may_gather:
        way_out = ""
        if task.across is None:
            way_out = (
                " Or set across='batch' in the task, which computes the loss from the outputs of "
                "all parts."
            )
        raise ValueError(
            f"Cannot compute this loss with {divided}: {reason}, so the mean over the parts of a "
            "batch is not the loss of the batch. Return one value per example that depends on "
            f"that example alone: leave out the mean, and pass masks as weights.{way_out} "
            "With virtual_replicas such a loss cannot be computed, and losses by output need "
            "strategy=Sharded()."
        )
    weights = None if batch.weights is None else replicas.whole(batch.weights, n)
    targets = replicas.whole(batch.targets, n)
    if is_training and task.across is None:
        # Replaced over the whole batch, as on one device: each replica would choose another row.
        targets = without_idle_rows(targets, weights)
    if names_axis(jax.make_jaxpr(task.loss)(*outputs, *batch.targets)):  # It gathers by itself.
        own = jax.tree.map(lambda x: replicas.own(x, n), targets)
        return result if weights is None else _evaluate_loss(task, outputs, own, n)
    outputs = replicas.whole(outputs, n, None if rows_of is None else rows_of())
    result = _evaluate_loss(task, outputs, targets, n * replicas.n)
    return result._replace(
        values=replicas.own(result.values, n) if result.values.ndim else result.values,
        weights=None if result.weights is None else replicas.own(result.weights, n),
    )


def losses_by_row(
    loss: Any, outputs: Outputs, targets: PyTree
) -> Iterator[tuple[str, Function, Outputs, Outputs]]:
    """Yields the losses that are not marked `by_row`, with their names and arguments."""
    if not isinstance(loss, LossByOutput):
        if not is_by_row(loss):
            yield "The loss", loss, outputs, targets
        return
    for name, each in loss.losses.items():
        if not is_by_row(each):
            output, target = loss.pick(name, *outputs, *targets)
            yield f"The loss of output {name!r}", each, (output,), (target,)


def metrics_by_row(task: TrainTask | EvalTask) -> Iterator[tuple[str, Function]]:
    """Yields the metrics with one value per example, except losses and those marked `by_row`."""
    for name, metric in task.metrics.items():
        is_safe = is_by_row(metric.values) or is_loss_of_output(metric)
        if metric.values is not None and not is_safe:
            yield name, metric.values


def _why_whole(
    task: TrainTask | EvalTask,
    result: LossResult,
    outputs: Outputs,
    targets: PyTree,
    *,
    is_tried: bool,
) -> str:
    """Returns why the loss of a batch cannot be computed from its parts; "" if it can."""
    if result.values.ndim == 0:
        return "it is a scalar"
    if result.penalty is not None:
        return "its penalty is one number for the whole batch"
    if not is_tried and [*losses_by_row(task.loss, outputs, targets)]:
        return "the value of an example may depend on the other examples of the batch"
    return ""


def _how_divided(replicas: AnyReplicas, n_parts: int) -> str:
    """Returns the option that divides a batch, for messages; "" if it is computed as a whole."""
    if n_parts > 1:
        return f"accumulate={n_parts}"
    if isinstance(replicas, VirtualReplicas):
        return f"virtual_replicas={replicas.n}"
    return f"{replicas.n} devices" if replicas.n > 1 else ""


def _evaluate_loss(
    task: TrainTask | EvalTask, outputs: Outputs, targets: Outputs, n: int
) -> LossResult:
    """Calls the loss of a task for `n` examples, and checks its results."""
    loss, factor = task.loss, weight_of(task.loss, task.loss_weights)
    if loss is no_loss:
        return LossResult(jnp.zeros(n))
    result = in_range(loss, *outputs, *targets)
    parts = result if isinstance(result, tuple) else (result,)
    is_by_output = isinstance(loss, LossByOutput)
    if not 1 <= len(parts) <= 3 or not (is_by_output or _are_arrays(parts)):
        kinds = ", ".join(type(part).__name__ for part in parts)
        received = f"a tuple of {len(parts)} ({kinds})" if isinstance(result, tuple) else kinds
        raise TypeError(
            f"The loss returned {received}; expected one value per example, of shape ({n},), or a "
            "tuple (values, weights), (values, penalty) or (values, weights, penalty)."
        )
    values, *rest = in_float32((jnp.asarray(parts[0]), *parts[1:]))
    if isinstance(task, TrainTask) and not jnp.issubdtype(values.dtype, jnp.floating):
        raise TypeError(
            f"The loss returned {values.dtype} values; expected floating-point numbers, which have "
            "a gradient. Do not round, compare or take the argmax of outputs in a loss."
        )
    penalty = None
    if rest and not isinstance(rest[-1], Mapping) and not jnp.ndim(rest[-1]):
        penalty = rest.pop()
    weights = rest[0] if rest else None
    losses.check_loss_shape(values.shape, outputs, targets, n)
    if weights is not None and not is_by_output:
        weights = beside(jnp.asarray(weights, float), values.shape, "The loss")
    return LossResult(values if factor == 1 else factor * values, weights, penalty)


def _are_arrays(parts: tuple[PyTree, ...]) -> bool:
    """Whether a loss returned arrays or numbers; three are values, weights, scalar penalty."""
    is_array = [hasattr(part, "shape") or isinstance(part, int | float) for part in parts]
    is_optional = all(is_array[i] or part is None for i, part in enumerate(parts))
    is_order = len(parts) < 3 or (np.ndim(parts[1]) > 0 and not np.ndim(parts[2]))
    return is_array[0] and is_optional and is_order
