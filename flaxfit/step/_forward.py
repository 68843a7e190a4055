"""The forward passes of a task: the model applied to a batch, its loss, its metrics as sums."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.core import DenyList
from redex.util import expand_to_tuple

from flaxfit.data._batch import Batch, call, n_examples
from flaxfit.data._sample_weights import OTHER_OUTPUTS, of_output
from flaxfit.state._train_state import TrainState
from flaxfit.step._batch_loss import LossResult, check_metrics, check_objective, loss_of
from flaxfit.step._objective import Calls, call_objective, replayed, sums_of_aux
from flaxfit.step._own_weights import check_own_weights
from flaxfit.step._random import rngs_of
from flaxfit.step._replicas import AnyReplicas, Replicas
from flaxfit.task._label_counts import count_weights, valid_weights
from flaxfit.task._multi_output import (
    LossByOutput,
    MetricOfOutput,
    is_loss_of_output,
    labels_out_of_range,
)
from flaxfit.task._precision import in_float32, in_precision, like
from flaxfit.task._task import EvalTask, TrainTask
from flaxfit.tree._types import Function, Params, PyTree, Rngs, Sums
from flaxfit.tree._weights import beside, joined_weights

_ALONE = Replicas(None)


class ForwardPass(NamedTuple):
    """The results of one forward pass, on one replica."""

    values: PyTree
    """The loss: per example `(batch, ...)`, or a scalar; None if there is none."""
    sums: dict[str, Sums]
    """The sums of the loss and of the metrics."""
    outputs: tuple[PyTree, ...]
    weights: PyTree = None
    """The weights that the loss returned with its values; None if it does not."""
    penalty: PyTree = None
    """The sum of the penalty of the loss and the model's `losses`; None if there is neither."""
    model_state: PyTree = ()
    not_added: Mapping[str, tuple[()]] = {}
    """The collections whose values may be terms of the loss, and are not added to it."""


def forward(
    task: TrainTask,
    params: Params,
    model_state: PyTree,
    batch: Batch,
    key: jax.Array,
    replicas: AnyReplicas = _ALONE,
) -> ForwardPass:
    """Applies the model in training, and the loss and the metrics to its outputs."""
    n_parts = task.accumulate if task.across is None else 1
    if task.objective is not None:
        return _objective_pass(task, params, model_state, batch, key, replicas, n_parts)
    outputs, updates = apply_model(task, params, model_state, batch, rngs_of(task.rngs, key))

    def outputs_of(batch: Batch) -> PyTree:
        return apply_model(task, params, model_state, batch, rngs_of(task.rngs, key))[0]

    result = compare(
        task,
        outputs,
        batch,
        replicas,
        n_parts=n_parts,
        is_training=True,
        rows_of=lambda: which_have_rows(outputs_of, batch),
    )
    return result._replace(
        penalty=sum_of_penalties(result.penalty, updates),
        model_state=updated_state(model_state, updates),
        not_added={name: () for name in updates if _may_be_loss(name, model_state)},
    )


def returns_weights(task: TrainTask, state: TrainState, batch: Batch) -> bool:
    """Whether the loss or the objective of a task returns weights with its values."""

    def weights(state: TrainState, batch: Batch) -> PyTree:
        return forward(task, state.params, state.model_state, batch, state.key).weights

    return jax.eval_shape(weights, state, batch) is not None


def forward_eval(
    task: EvalTask,
    state: PyTree,
    batch: Batch,
    key: jax.Array | None,
    replicas: AnyReplicas = _ALONE,
) -> ForwardPass:
    """Applies the model in evaluation, and the loss and the metrics to its outputs."""
    options = {} if key is None else {"rngs": rngs_of(task.rngs, key)}
    apply = in_precision(task.apply, task.precision)
    if task.objective is not None:
        return _objective_measured(task, apply, state, batch, key, options, replicas)

    def outputs_of(batch: Batch) -> PyTree:
        return call(apply, state.variables, batch.inputs, **options)

    result = compare(
        task,
        outputs_of(batch),
        batch,
        replicas,
        rows_of=lambda: which_have_rows(outputs_of, batch),
    )
    return result._replace(penalty=None)


def _objective_pass(
    task: TrainTask,
    params: Params,
    model_state: PyTree,
    batch: Batch,
    key: jax.Array,
    replicas: AnyReplicas,
    n_parts: int,
) -> ForwardPass:
    """Computes the objective of a task, which calls the model in training."""

    def run(model_state: PyTree, inputs: PyTree, rngs: Rngs) -> tuple[PyTree, PyTree, PyTree]:
        outputs, updates = apply_model(task, params, model_state, Batch(inputs), rngs)
        return in_float32(outputs), updates, updated_state(model_state, updates)

    calls = Calls(run, model_state, functools.partial(_rngs_of_call, task.rngs, key))
    result = _objective_sums(task, calls, batch, rngs_of(task.rngs, key), replicas, n_parts)
    penalties = [sum_of_penalties(None, updates) for updates in calls.updates]
    penalties = [penalty for penalty in penalties if penalty is not None]
    names = {name for updates in calls.updates for name in updates}
    return result._replace(
        penalty=sum(penalties) if penalties else None,
        model_state=calls.model_state,
        not_added={name: () for name in sorted(names) if _may_be_loss(name, model_state)},
    )


def _objective_measured(
    task: EvalTask,
    apply: Function,
    state: PyTree,
    batch: Batch,
    key: jax.Array | None,
    options: Mapping[str, PyTree],
    replicas: AnyReplicas,
) -> ForwardPass:
    """Computes the objective of a task in evaluation, and the metrics of the model's outputs."""

    def run(model_state: PyTree, inputs: PyTree, rngs: Rngs) -> tuple[PyTree, PyTree, PyTree]:
        given = {**options, "rngs": rngs} if rngs else options
        return in_float32(call(apply, state.variables, inputs, **given)), {}, model_state

    calls = Calls(run, (), functools.partial(_rngs_of_call, task.rngs, key))
    try:
        result = _objective_sums(task, calls, batch, options.get("rngs", {}), replicas, 1)
    except KeyError as error:
        if not task.rngs:
            error.add_note(
                "Evaluation has no random keys unless their streams are named: "
                "Model(..., eval_rngs=('dropout',)), or EvalTask(..., rngs=('dropout',))."
            )
        raise
    if not task.metrics:
        return result
    outputs = call(apply, state.variables, batch.inputs, **options)
    measured = compare(task, outputs, batch, replicas)
    return result._replace(sums=result.sums | measured.sums)


def _rngs_of_call(names: Sequence[str], key: jax.Array | None, number: int) -> Rngs:
    """The keys of one call of a model by an objective; of the first, as with a loss."""
    if key is None:
        return {}
    return rngs_of(names, jax.random.fold_in(key, len(names) + number) if number else key)


def _objective_sums(
    task: TrainTask | EvalTask,
    calls: Calls,
    batch: Batch,
    rngs: Rngs,
    replicas: AnyReplicas,
    n_parts: int,
) -> ForwardPass:
    """Calls the objective of a task; returns its values, and the sums of these and of its aux."""
    batch = batch._replace(targets=in_float32(batch.targets))
    weights = weights_of(batch)
    found = call_objective(task.objective, calls, batch, rngs)
    outputs = tuple(calls.outputs)
    if not outputs:
        raise ValueError(
            "The objective did not call the model: compute its values from apply(*batch.inputs)."
        )
    check_objective(task, outputs, batch, rngs, replicas, n_parts=n_parts)
    if found.weights is not None:
        function = replayed(task.objective, rngs)
        check_own_weights("the objective", lambda *given: function(*given)[0], outputs, (batch,))
    result = LossResult(found.values, valid_weights(found.weights))
    sums = {"loss": _loss_sums(None, result, weights, (), batch), **count_weights(found.weights)}
    sums |= sums_of_aux(found.aux, weights, result.weights)
    return ForwardPass(result.values, sums, (), result.weights)


def apply_model(
    task: TrainTask, params: Params, model_state: PyTree, batch: Batch, rngs: Rngs
) -> tuple[PyTree, Mapping[str, PyTree]]:
    """The outputs of the model in training, and the collections that it updates."""
    result = call(
        in_precision(task.apply, task.precision),
        {"params": params, **model_state},
        batch.inputs,
        rngs=rngs,
        mutable=DenyList(("params", "intermediates")) if task.mutable is None else task.mutable,
    )
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    return result if is_pair else (result, {})


def sum_of_penalties(penalty: PyTree, updates: Mapping[str, PyTree]) -> PyTree:
    """The penalty of the loss and the model's `losses`; None if there is neither."""
    penalties = jax.tree.leaves(in_float32((penalty, updates.get("losses", ()))))
    return sum(map(jnp.sum, penalties)) if penalties else None


def updated_state(model_state: PyTree, updates: Mapping[str, PyTree]) -> PyTree:
    """The collections of a model state, as a model has updated them."""
    return {name: _updated(name, updates.get(name, old), old) for name, old in model_state.items()}


def as_outputs(result: PyTree) -> tuple[PyTree, ...]:
    """The outputs of a model, one or several, as a tuple.

    Raises:
      TypeError: there are none.
    """
    if result is None:
        raise TypeError("The model returned None: its call needs a `return` of the outputs.")
    return expand_to_tuple(result)


def which_have_rows(outputs_of: Function, batch: Batch) -> PyTree:
    """Which outputs of a model have an axis of examples: those that grow with the batch."""

    def shapes(factor: int) -> PyTree:
        resized = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((factor * x.shape[0], *x.shape[1:]), x.dtype), batch
        )
        return jax.eval_shape(lambda batch: as_outputs(outputs_of(batch)), resized)

    return jax.tree.map(lambda one, two: one.shape[:1] != two.shape[:1], shapes(1), shapes(2))


def weights_of(batch: Batch, loss: Any = None) -> PyTree:
    """The weights of a batch, of examples or tokens, or by output; 1 where it has none."""
    if batch.weights is None:
        return jnp.ones(n_examples(batch))
    # In the default dtype: with 64 bits enabled, their sum has 64 bits, too.
    weights = jax.tree.map(lambda each: jnp.asarray(each, float), batch.weights)
    if isinstance(loss, LossByOutput) and not isinstance(weights, Mapping) and weights.ndim > 1:
        return {OTHER_OUTPUTS: weights}  # The outputs may differ in the values for each weight.
    if isinstance(weights, Mapping) and OTHER_OUTPUTS not in weights:
        return {OTHER_OUTPUTS: jnp.ones(n_examples(batch)), **weights}
    return weights


def weight_sums(loss: Any, batch: Batch) -> PyTree:
    """The weights that the sums of a loss are divided by: their sum, or that by output."""
    weights = weights_of(batch, loss)
    if isinstance(weights, Mapping):
        return {name: jnp.sum(of_output(weights, name)) for name in loss.losses}
    return jnp.sum(weights)


def compare(
    task: TrainTask | EvalTask,
    outputs: PyTree,
    batch: Batch,
    replicas: AnyReplicas,
    *,
    n_parts: int = 1,
    is_training: bool = False,
    rows_of: Callable[[], PyTree] | None = None,
) -> ForwardPass:
    """Applies the loss and the metrics to the outputs of a model and the targets, in float32."""
    outputs = in_float32(as_outputs(outputs))
    batch = batch._replace(targets=in_float32(batch.targets))
    weights = weights_of(batch, task.loss)
    replaced = batch  # For the losses of outputs with weights; metrics see all targets.
    if isinstance(weights, Mapping) and isinstance(task.loss, LossByOutput):
        replaced = task.loss.without_idle_targets(batch)
    result, sums = LossResult(), {}
    if task.loss is not None:
        result = loss_of(
            task,
            outputs,
            replaced,
            replicas,
            n_parts=n_parts,
            is_training=is_training,
            rows_of=rows_of,
        )
        sums |= count_weights(result.weights)
        result = result._replace(weights=valid_weights(result.weights))
        sums["loss"] = _loss_sums(task.loss, result, weights, outputs, replaced)
        sums |= labels_out_of_range(task.loss, weights, outputs, batch.targets)
    check_metrics(task, outputs, batch.targets, replicas, n_parts=n_parts)
    # No gradient of the metrics is asked for: where nothing is compiled, they see plain arrays.
    measured = jax.lax.stop_gradient(outputs) if is_training else outputs
    for name, metric in task.metrics.items():
        output = metric.output if isinstance(metric, MetricOfOutput) else OTHER_OUTPUTS
        targets = replaced.targets if is_loss_of_output(metric) else batch.targets
        sums[name] = _measure(name, metric, measured, targets, of_output(weights, output))
    return ForwardPass(result.values, sums, outputs, result.weights, result.penalty)


def _loss_sums(
    loss: Any, result: LossResult, weights: PyTree, outputs: tuple[PyTree, ...], batch: Batch
) -> PyTree:
    """The weighted sum of a loss over all its elements, and the weight of that sum.

    With weights by output, such a pair for each of them.
    """
    values, own = result.values, result.weights
    if isinstance(weights, Mapping) or isinstance(own, Mapping):
        return loss.sums(weights, *outputs, *batch.targets)
    if values.ndim == 0:
        return values * weights.size, jnp.asarray(weights.size, values.dtype)
    if own is not None:
        weights = joined_weights(own, weights, values.shape, "The loss")
    w = beside(weights, values.shape, "The loss")
    # Not merely a product: a row of weight 0 may hold a NaN.
    total = jnp.sum(jnp.where(w != 0, values * w, 0))
    return total, jnp.sum(weights) * (values.size // weights.size)


def _measure(name: str, metric: Any, outputs: PyTree, targets: PyTree, weights: jax.Array) -> Sums:
    """The sums of a metric over a batch.

    Raises:
      TypeError: it takes another number of outputs and targets.
    """
    try:
        return metric.measure(*outputs, *targets, weights=weights)
    except TypeError as error:
        _check_arguments(name, metric.measure, outputs, targets, error, weights=None)
        if metric.values is not None:
            _check_arguments(name, metric.values, outputs, targets, error)
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
    except (TypeError, ValueError):  # Some callables have none.
        return
    try:
        signature.bind(*outputs, *targets, **options)
    except TypeError as mismatch:
        raise TypeError(
            f"The metric {name!r} takes other arguments than it is given: {mismatch}. It takes "
            f"{signature}, and is called with the outputs and the targets by position, "
            f"{len(outputs)} and {len(targets)} of them{', and with weights=' if options else ''}."
        ) from error


def _updated(name: str, new: PyTree, old: PyTree) -> PyTree:
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise ValueError(
            f"The collection {name!r} does not keep its structure: each step would add to what "
            f"`sow` has left there. If it holds terms of the loss, Model(..., losses=[{name!r}]) "
            "adds them, as it does those in 'losses'; else sow into 'intermediates'."
        )
    return like(new, old)


def _may_be_loss(collection: str, model_state: Mapping[str, PyTree]) -> bool:
    """Whether a collection that is not "losses" is dropped, or is a loss by its name."""
    if collection in ("params", "losses", "intermediates"):
        return False
    return collection not in model_state or "loss" in collection.lower()
