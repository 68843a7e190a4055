"""The forward passes of a task: the model applied to a batch, its loss, its metrics as sums."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.core import DenyList
from redex.util import expand_to_tuple

from flaxfit.data._batch import Batch, call, n_examples
from flaxfit.data._sample_weights import OTHER_OUTPUTS, of_output
from flaxfit.step._batch_loss import check_metrics, loss_of
from flaxfit.step._replicas import Replicas, VirtualReplicas
from flaxfit.task._multi_output import MetricOfOutput, labels_out_of_range
from flaxfit.task._precision import in_float32, in_precision, like
from flaxfit.tree._types import Params, PyTree

ALONE = Replicas(None)
"""What forward passes run on that nothing is divided among."""

Sums = dict[str, Any]
"""By metric: sums that add up over batches, devices and hosts."""


class ForwardPass(NamedTuple):
    """What one forward pass in training gives."""

    values: jax.Array
    """The loss: per example `(batch, ...)`, or a scalar."""
    penalty: Any
    """The sum of the penalty of the loss and the model's `losses`; None if there is neither."""
    sums: Sums
    """The sums of the loss and of the metrics, on this replica."""
    outputs: tuple[PyTree, ...]
    model_state: PyTree
    not_added: dict[str, tuple[()]]
    """The collections whose values may be terms of the loss, and are not added to it."""


class EvalPass(NamedTuple):
    """What one forward pass in evaluation gives."""

    values: PyTree
    """The loss: per example `(batch, ...)`, or a scalar; None if there is none."""
    sums: Sums
    """The sums of the metrics and of the loss, on this replica."""
    outputs: tuple[PyTree, ...]


def forward(
    task: Any,
    params: Params,
    model_state: PyTree,
    batch: Batch,
    key: jax.Array,
    replicas: Replicas | VirtualReplicas = ALONE,
) -> ForwardPass:
    """Applies the model in training, and the loss and the metrics to its outputs.

    Args:
      task: a `TrainTask`.
      params: all parameters.
      model_state: the other collections of the model.
      batch: the examples of this replica.
      key: the random key of this step and replica.
      replicas: what the batch is divided among.
    """
    outputs, updates = apply_model(task, params, model_state, batch, key)
    outputs, batch = _compared(outputs, batch)
    values, penalty = loss_of(
        task, outputs, batch, replicas, n_parts=task.accumulate, is_training=True
    )
    check_metrics(task, outputs, batch.targets, replicas, n_parts=task.accumulate)
    penalties = jax.tree.leaves(in_float32((penalty, updates.get("losses", ()))))
    penalties = [jnp.sum(x) for x in penalties]
    weights = weights_of(batch)
    sums = {
        "loss": loss_sums(task.loss, values, outputs, batch),
        **labels_out_of_range(task.loss, weights, outputs, batch.targets),
        # No gradient of the metrics is asked for: where nothing is compiled, they see plain arrays.
        **measure(task.metrics, jax.lax.stop_gradient(outputs), batch.targets, weights),
    }
    not_added = {name: () for name in updates if _may_be_loss(name, model_state)}
    model_state = {
        name: _updated(name, updates.get(name, old), old) for name, old in model_state.items()
    }
    penalty = sum(penalties) if penalties else None
    return ForwardPass(values, penalty, sums, outputs, model_state, not_added)


def apply_model(
    task: Any, params: Params, model_state: PyTree, batch: Batch, key: jax.Array
) -> tuple[Any, Any]:
    """The outputs of the model in training, and the collections that it updates."""
    return _outputs_and_updates(
        call(
            in_precision(task.apply, task.precision),
            {"params": params, **model_state},
            batch.inputs,
            rngs=rngs_of(task.rngs, key),
            mutable=DenyList(("params", "intermediates")) if task.mutable is None else task.mutable,
        )
    )


def forward_eval(
    task: Any,
    state: PyTree,
    batch: Batch,
    key: jax.Array | None,
    replicas: Replicas | VirtualReplicas = ALONE,
) -> EvalPass:
    """Applies the model in evaluation, and the loss and the metrics to its outputs."""
    options = {} if key is None else {"rngs": rngs_of(task.rngs, key)}
    apply = in_precision(task.apply, task.precision)
    outputs = call(apply, state.variables, batch.inputs, **options)
    outputs, batch = _compared(outputs, batch)
    check_metrics(task, outputs, batch.targets, replicas)
    sums = measure(task.metrics, outputs, batch.targets, weights_of(batch))
    if task.loss is None:
        return EvalPass(None, sums, outputs)
    values, _ = loss_of(task, outputs, batch, replicas)
    sums["loss"] = loss_sums(task.loss, values, outputs, batch)
    sums |= labels_out_of_range(task.loss, weights_of(batch), outputs, batch.targets)
    return EvalPass(values, sums, outputs)


def as_outputs(result: PyTree) -> tuple[Any, ...]:
    """The outputs of a model, one or several, as a tuple.

    >>> as_outputs(1)
    (1,)

    Raises:
      TypeError: there are none.
    """
    if result is None:
        raise TypeError("The model returned None: its call needs a `return` of the outputs.")
    return expand_to_tuple(result)


def _compared(outputs: PyTree, batch: Batch) -> tuple[tuple[Any, ...], Batch]:
    """The outputs as a tuple, and the batch, both as losses and metrics compare them."""
    return in_float32(as_outputs(outputs)), batch._replace(targets=in_float32(batch.targets))


def measure(metrics: Mapping[str, Any], outputs: PyTree, targets: PyTree, weights: PyTree) -> Sums:
    """The sums of the metrics over a batch.

    Raises:
      TypeError: a metric takes another number of outputs and targets.
    """
    sums = {}
    for name, metric in metrics.items():
        try:
            output = metric.output if isinstance(metric, MetricOfOutput) else OTHER_OUTPUTS
            own = of_output(weights, output)
            sums[name] = metric.measure(*outputs, *targets, weights=own)
        except TypeError as error:
            _check_arguments(name, metric, outputs, targets, error)
            raise
    return sums


def _check_arguments(
    name: str, metric: Any, outputs: PyTree, targets: PyTree, error: TypeError
) -> None:
    functions = [(metric.measure, {"weights": None})]
    functions += [] if metric.values is None else [(metric.values, {})]
    for function, options in functions:
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # Of some callables it is not known.
            continue
        try:
            signature.bind(*outputs, *targets, **options)
        except TypeError as mismatch:
            raise TypeError(
                f"The metric {name!r} takes other arguments than it is given: {mismatch}. It takes "
                f"{signature}, and is called with the outputs and the targets by position, "
                f"{len(outputs)} and {len(targets)} of them"
                f"{', and with weights=' if options else ''}."
            ) from error


def loss_sums(loss: Any, values: jax.Array, outputs: tuple[PyTree, ...], batch: Batch) -> Any:
    """The weighted sum of a loss over all its elements, and the weight of that sum.

    Where outputs have weights of their own, such a pair for each of them.
    """
    weights = weights_of(batch)
    if isinstance(weights, Mapping):
        return loss.sums(weights, *outputs, *batch.targets)
    if values.ndim == 0:
        return values * weights.size, jnp.asarray(weights.size, values.dtype)
    w = weights.reshape(weights.shape + (1,) * (values.ndim - 1))
    # Not merely a product: a row of weight 0 may hold a NaN.
    total = jnp.sum(jnp.where(w != 0, values * w, 0))
    return total, jnp.sum(weights) * (values.size // weights.size)


def weight_sums(loss: Any, batch: Batch) -> Any:
    """The weights that the sums of a loss are to be divided by: their sum, or that by output."""
    weights = weights_of(batch)
    if not isinstance(weights, Mapping):
        return jnp.sum(weights)
    return {name: jnp.sum(of_output(weights, name)) for name in loss.losses}


def weights_of(batch: Batch) -> Any:
    """The weights of a batch, of the examples or by output; 1 where it has none."""
    if batch.weights is None:
        return jnp.ones(n_examples(batch))
    # In the default dtype: with 64 bits enabled, their sum has 64 bits, too.
    weights = jax.tree.map(lambda each: jnp.asarray(each, float), batch.weights)
    if isinstance(weights, Mapping) and OTHER_OUTPUTS not in weights:
        return {OTHER_OUTPUTS: jnp.ones(n_examples(batch)), **weights}
    return weights


def _outputs_and_updates(result: PyTree) -> tuple[Any, Mapping[str, Any]]:
    """What a model returned in training: a pair whose second part is a mapping has updates."""
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    return result if is_pair else (result, {})


def _updated(name: str, new: PyTree, old: PyTree) -> Any:
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise ValueError(
            f"The collection {name!r} does not keep its structure: each step would add to what "
            f"`sow` has left there. If it holds terms of the loss, Model(..., losses=[{name!r}]) "
            "adds them, as it does those in 'losses'; else sow into 'intermediates'."
        )
    return like(new, old)


def _may_be_loss(collection: str, model_state: Mapping[str, Any]) -> bool:
    """Whether a collection that is not "losses" is dropped, or is a loss by its name."""
    if collection in ("params", "losses", "intermediates"):
        return False
    return collection not in model_state or "loss" in collection.lower()


def rngs_of(names: Sequence[str], key: jax.Array) -> dict[str, jax.Array]:
    """The keys of the random streams of a step."""
    return {name: jax.random.fold_in(key, i) for i, name in enumerate(names)}
