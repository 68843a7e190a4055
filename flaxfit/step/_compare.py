"""Computes the sums of the loss and the metrics of a task from the outputs of its model."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxfit.data._batch import Batch, n_examples
from flaxfit.data._sample_weights import OTHER_OUTPUTS, of_output
from flaxfit.step._batch_loss import LossResult, loss_of
from flaxfit.step._model_call import as_outputs
from flaxfit.step._replicas import AnyReplicas
from flaxfit.task import (
    EvalTask,
    LossByOutput,
    MetricOfOutput,
    TrainTask,
    check_own_weights_of_all,
    count_weights,
    for_all_outputs,
    in_float32,
    is_loss_of_output,
    labels_out_of_range,
    valid_weights,
)
from flaxfit.tree import Function, PyTree, Sums, beside, joined_weights


class ForwardPass(NamedTuple):
    """The results of one forward pass, on one replica."""

    values: PyTree
    """The loss: `(batch, ...)`, or a scalar; None if there is no loss."""
    sums: dict[str, Sums]
    """The sums of the loss and of the metrics."""
    outputs: tuple[PyTree, ...]
    weights: PyTree = None
    """The weights that the loss returned with its values, or None."""
    penalty: PyTree = None
    """The penalty of the loss plus the model's `losses`; None if there is neither."""
    sown: PyTree = None
    """The part of the penalty that the model added."""
    model_state: PyTree = ()
    not_added: Mapping[str, tuple[()]] = {}
    """The collections that may be meant as terms of the loss, but are not added to it."""


def compare(
    task: TrainTask | EvalTask,
    outputs: PyTree,
    batch: Batch,
    replicas: AnyReplicas,
    *,
    rows_of: Callable[[], PyTree] | None = None,
) -> ForwardPass:
    """Applies the loss and the metrics to outputs and targets, in float32."""
    outputs = in_float32(as_outputs(outputs))
    batch = batch._replace(targets=in_float32(batch.targets))
    given, task = task, for_all_outputs(task, outputs, batch)
    weights = weights_of(batch, task.loss)
    replaced = batch  # For losses by output with weights; metrics see the original targets.
    if isinstance(weights, Mapping) and isinstance(task.loss, LossByOutput):
        replaced = task.loss.without_idle_targets(batch)
    result, sums = LossResult(), {}
    if task.loss is not None:
        result = loss_of(task, outputs, replaced, replicas, rows_of=rows_of)
        check_own_weights_of_all(task, given, result.weights)
        sums |= count_weights(result.weights)
        result = result._replace(weights=valid_weights(result.weights))
        sums["loss"] = sums_of_loss(task.loss, result, weights, outputs, replaced)
        sums |= labels_out_of_range(task.loss, weights, outputs, batch.targets)
    # Metrics need no gradient; in an eager run, this gives them concrete arrays.
    measured = jax.lax.stop_gradient(outputs) if isinstance(task, TrainTask) else outputs
    for name, metric in task.metrics.items():
        output = metric.output if isinstance(metric, MetricOfOutput) else OTHER_OUTPUTS
        targets = replaced.targets if is_loss_of_output(metric) else batch.targets
        sums[name] = _measure(name, metric, measured, targets, of_output(weights, output))
    return ForwardPass(result.values, sums, outputs, result.weights, result.penalty)


def weights_of(batch: Batch, loss: Any = None) -> PyTree:
    """Returns the weights of a batch, by example, token or output; 1 by default."""
    if batch.weights is None:
        return jnp.ones(n_examples(batch))
    # JAX's default float dtype: with 64 bits enabled, the sum of weights also has 64 bits.
    weights = jax.tree.map(lambda each: jnp.asarray(each, float), batch.weights)
    if isinstance(loss, LossByOutput) and not isinstance(weights, Mapping) and weights.ndim > 1:
        return {OTHER_OUTPUTS: weights}  # Outputs may have different numbers of values per weight.
    if isinstance(weights, Mapping) and OTHER_OUTPUTS not in weights:
        return {OTHER_OUTPUTS: jnp.ones(n_examples(batch)), **weights}
    return weights


def weight_sums(loss: Any, batch: Batch) -> PyTree:
    """Returns the sum of the weights that a loss is divided by, or sums by output."""
    weights = weights_of(batch, loss)
    if isinstance(weights, Mapping):
        return {name: jnp.sum(of_output(weights, name)) for name in loss.losses}
    return jnp.sum(weights)


def sums_of_loss(
    loss: Any, result: LossResult, weights: PyTree, outputs: tuple[PyTree, ...], batch: Batch
) -> PyTree:
    """Returns the weighted sum of a loss over all elements, and the sum of their weights.

    With weights by output, it returns one pair per output.
    """
    values, own = result.values, result.weights
    if isinstance(weights, Mapping) or isinstance(own, Mapping):
        return loss.sums(weights, *outputs, *batch.targets)
    if values.ndim == 0:
        return values * weights.size, jnp.asarray(weights.size, values.dtype)
    if own is not None:
        weights = joined_weights(own, weights, values.shape, "The loss")
    w = beside(weights, values.shape, "The loss")
    # A product alone would not do: 0 * NaN is NaN, and a row of weight 0 may hold a NaN.
    total = jnp.sum(jnp.where(w != 0, values * w, 0))
    return total, jnp.sum(weights) * (values.size // weights.size)


def _measure(name: str, metric: Any, outputs: PyTree, targets: PyTree, weights: jax.Array) -> Sums:
    """Computes the sums of a metric over a batch.

    Raises:
      TypeError: the metric takes another number of outputs and targets.
      ValueError: the shapes do not fit, or a metric of one output was given several.
    """
    try:
        return jax.tree.map(jnp.asarray, metric.measure(*outputs, *targets, weights=weights))
    except TypeError as error:
        _check_arguments(name, metric.measure, outputs, targets, error, weights=None)
        if metric.values is not None:
            _check_arguments(name, metric.values, outputs, targets, error)
        raise
    except ValueError as error:
        is_of_output = isinstance(metric, MetricOfOutput)
        if len(outputs) == 1 and isinstance(outputs[0], Mapping) and not is_of_output:
            names = [*map(repr, outputs[0])]
            raise ValueError(
                f"The metric {name!r} failed on a mapping of outputs, {', '.join(names)}: {error}. "
                f"Put the metrics of single outputs into lists by name: "
                f"metrics={{{names[0]}: [{name!r}]}}."
            ) from error
        shapes = [jax.tree.map(jnp.shape, tree) for tree in (outputs, targets)]
        error.add_note(f"The metric is {name!r}, of outputs {shapes[0]} and targets {shapes[1]}.")
        raise


def _check_arguments(
    name: str,
    function: Function,
    outputs: PyTree,
    targets: PyTree,
    error: TypeError,
    **options: None,
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some callables have no signature.
        return
    try:
        signature.bind(*outputs, *targets, **options)
    except TypeError as mismatch:
        lists = ", ".join([f"[{name!r}]", *["[]"] * (len(outputs) - 1)])
        hint = f" Put the metrics of single outputs into a list for each: metrics=[{lists}]."
        raise TypeError(
            f"The metric {name!r} was called with the wrong arguments: {mismatch}. Its signature "
            f"is {signature}, and it gets the outputs and the targets by position, "
            f"{len(outputs)} and {len(targets)} of them{', and with weights=' if options else ''}."
            f"{hint if len(outputs) > 1 else ''}"
        ) from error
