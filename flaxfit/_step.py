"""The pure core: one training step is `(state, batch) -> (state, sums)`, and so is measuring."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core import DenyList
from redex.util import expand_to_tuple

from flaxfit._batch import Batch, call, n_examples
from flaxfit._state import TrainState
from flaxfit._totals import pack, unpack

Sums = dict[str, Any]
"""By metric: sums that add up over batches, devices and hosts; `compute` turns them into values."""


def make_train_step(
    task: Any,
    *,
    axis_name: str | None = None,
    grad_norm: bool = True,
    keep_grads: bool = False,
    skip_empty: bool = True,
) -> Callable[[TrainState, Batch], tuple[TrainState, Any]]:
    """Makes the pure update of one training step: `(state, batch) -> (state, sums)`.

    The gradient is that of the weighted mean loss over the whole batch, `sum(w * loss) / sum(w)`,
    plus the penalty, however the examples and their weights are spread over the replicas.
    A batch whose weights sum to zero changes nothing but the step.

    >>> import numpy as np, optax
    >>> from flaxfit import TrainState, TrainTask
    >>> task = TrainTask(lambda v, x, **_: (v["params"] * x, {}), optax.sgd(0.5), "mse")
    >>> key, one = jax.random.key(0), np.ones(1, np.float32)
    >>> state = TrainState(np.int32(0), one, task.optimizer.init(one), {}, key)
    >>> state, sums = make_train_step(task)(state, Batch((one,), (2 * one,)))
    >>> float(state.params[0])
    2.0

    Args:
      task: a `TrainTask`.
      axis_name: the mapped axis to reduce over, where the step runs once per replica.
      grad_norm: whether to report the global norm of the gradients.
      keep_grads: whether to return `(state, (sums, grads))`.
      skip_empty: whether the weights of a batch may sum to zero; False saves the check.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        key = step_key(state.key, state.step, _replica(axis_name))
        total_weight = _sum(jnp.sum(_weights(batch)), axis_name)
        n_replicas = 1 if axis_name is None else jax.lax.psum(1, axis_name)

        def objective(params: Any) -> tuple[jax.Array, ForwardPass]:
            result = forward(task, params, state, batch, key)
            penalty = 0 if result.penalty is None else result.penalty
            if result.values.ndim == 0:
                return result.values + penalty, result
            # Divided by the weight of the whole batch, times the number of replicas: the mean of
            # these over the replicas is the mean over the examples.
            n_elements = result.values.size // n_examples(batch)
            share = total_weight * n_elements / n_replicas
            mean = result.sums["loss"][0] / jnp.where(share > 0, share, 1)
            return mean + penalty, result

        grads, result = jax.grad(objective, has_aux=True)(state.params)
        grads = _mean(grads, axis_name)
        updated = state.apply_gradient(
            task.optimizer, grads, model_state=average_state(result.model_state, axis_name)
        )
        has_weight = jnp.ones(())
        if skip_empty and batch.weights is not None:
            has_weight = jnp.where(total_weight > 0, 1.0, 0.0)
            unchanged = state.replace(step=updated.step)
            updated = _where(total_weight > 0, updated, unchanged)

        sums = _sum(result.sums, axis_name)
        per_step = {"grad_norm": optax.tree.norm(grads)} if grad_norm else {}
        if result.penalty is not None:
            per_step["penalty"] = _mean(result.penalty, axis_name)
        sums |= {name: (value * has_weight, has_weight) for name, value in per_step.items()}
        return updated, (sums, grads) if keep_grads else sums

    return train_step


class ForwardPass(NamedTuple):
    """What one forward pass in training gives."""

    values: jax.Array
    """The loss: per example `(batch, ...)`, or a scalar."""
    penalty: Any
    """The sum of the penalty of the loss and the model's `losses`; None where there is neither."""
    sums: Sums
    """The sums of the loss and of the metrics, on this replica."""
    outputs: tuple[Any, ...]
    model_state: Any


def forward(task: Any, params: Any, state: Any, batch: Batch, key: jax.Array) -> ForwardPass:
    """Applies the model in training, and the loss and the metrics to its outputs."""
    outputs, updates = call(
        task.apply,
        {"params": params, **state.model_state},
        batch.inputs,
        rngs=_rngs(task.rngs, key),
        mutable=DenyList(("params", "intermediates")) if task.mutable is None else task.mutable,
    )
    outputs = expand_to_tuple(outputs)
    values, penalty = evaluate_loss(task.loss, outputs, batch.targets)
    penalties = [jnp.sum(x) for x in jax.tree.leaves((penalty, updates.get("losses", ())))]
    weights = _weights(batch)
    sums = {
        "loss": _loss_sums(values, weights),
        **_measure(task.metrics, outputs, batch.targets, weights),
    }
    model_state = {name: updates.get(name, old) for name, old in state.model_state.items()}
    return ForwardPass(values, sum(penalties) if penalties else None, sums, outputs, model_state)


def make_eval_step(
    task: Any, *, axis_name: str | None = None
) -> Callable[[TrainState, Batch], Sums]:
    """Makes the pure measurement of one batch: `(state, batch) -> sums`.

    >>> import numpy as np
    >>> from flaxfit import EvalTask, InferenceState
    >>> task = EvalTask(lambda v, x: v["params"] * x, ["mse"])
    >>> state = InferenceState(np.int32(0), np.float32(3), {})
    >>> batch = Batch((np.ones(4, np.float32),), (np.zeros(4, np.float32),))
    >>> compute(make_eval_step(task)(state, batch), task.metrics)
    {'mse': 9.0}

    Args:
      task: an `EvalTask`.
      axis_name: the mapped axis to reduce over, where the step runs once per replica.
    """

    def eval_step(state: TrainState, batch: Batch) -> Sums:
        outputs = forward_eval(task, state, batch, axis_name)
        weights = _weights(batch)
        sums = _measure(task.metrics, outputs, batch.targets, weights)
        if task.loss is not None:
            values, _ = evaluate_loss(task.loss, outputs, batch.targets)
            sums["loss"] = _loss_sums(values, weights)
        return _sum(sums, axis_name)

    return eval_step


def make_predict_step(apply: Callable[..., Any]) -> Callable[[TrainState, Batch], Any]:
    """Makes the pure forward pass of one batch: `(state, batch) -> outputs`.

    >>> import numpy as np
    >>> from flaxfit import InferenceState
    >>> state = InferenceState(np.int32(0), np.float32(3), {})
    >>> float(make_predict_step(lambda v, x: v["params"] * x)(state, Batch((np.float32(2),))))
    6.0

    Args:
      apply: `apply(variables, *inputs)`, such as the `apply` of a module in evaluation mode.
    """

    def predict_step(state: TrainState, batch: Batch) -> Any:
        return call(apply, state.variables, batch.inputs)

    return predict_step


def step_key(key: jax.Array, step: Any, replica: Any = 0) -> jax.Array:
    """The random key of a step on a replica: a function of its position, never carried along.

    Stream number `i` of a task's `rngs` is given `fold_in(step_key(...), i)`.

    >>> step_key(jax.random.key(0), step=3, replica=1).shape
    ()
    """
    return jax.random.fold_in(jax.random.fold_in(key, step), replica)


def compute(sums: Sums, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The values of metrics from their sums, on the host; scalars become floats.

    >>> compute({"loss": (np.float32(6), np.float32(4))}, {})
    {'loss': 1.5}
    """
    values = {}
    sums = jax.device_get(sums)
    order = [name for name in ("loss", *metrics) if name in sums]
    for name in dict.fromkeys([*order, *sums]):
        parts = sums[name]
        if name in metrics:
            value = np.asarray(metrics[name].compute(parts))
        else:
            with np.errstate(invalid="ignore", divide="ignore"):
                value = np.float64(parts[0]) / np.float64(parts[1])
        values[name] = float(value) if value.ndim == 0 else value
    return values


def forward_eval(
    task: Any, state: Any, batch: Batch, axis_name: str | None = None
) -> tuple[Any, ...]:
    """Applies the model in evaluation: its outputs."""
    options = {}
    if task.rngs:
        options["rngs"] = _rngs(task.rngs, step_key(state.key, state.step, _replica(axis_name)))
    return expand_to_tuple(call(task.apply, state.variables, batch.inputs, **options))


def evaluate_loss(
    loss: Callable[..., Any], outputs: tuple[Any, ...], targets: tuple[Any, ...]
) -> tuple[jax.Array, Any]:
    """The values of a loss and its penalty, or None."""
    result = loss(*outputs, *targets)
    values, penalty = result if isinstance(result, tuple) else (result, None)
    return jnp.asarray(values), penalty


def average_state(model_state: Any, axis_name: str | None) -> Any:
    """One model state from those of the replicas: floats averaged, anything else of replica 0.

    A mean would turn counters and flags into floats, and cannot be taken of random keys.
    """
    if axis_name is None:
        return model_state

    def average(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return jax.lax.pmean(x, axis_name)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = jax.lax.all_gather(jax.random.key_data(x), axis_name)[0]
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return jax.lax.all_gather(x, axis_name)[0]

    return jax.tree.map(average, model_state)


def _measure(metrics: Mapping[str, Any], outputs: Any, targets: Any, weights: Any) -> Sums:
    return {
        name: metric.measure(*outputs, *targets, weights=weights)
        for name, metric in metrics.items()
    }


def _loss_sums(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weighted sum of a loss over all its elements, and the weight of that sum."""
    if values.ndim == 0:
        return values * weights.size, jnp.asarray(weights.size, values.dtype)
    w = weights.reshape(weights.shape + (1,) * (values.ndim - 1))
    # Not merely a product: a row of weight 0 may hold a NaN.
    total = jnp.sum(jnp.where(w != 0, values * w, 0))
    return total, jnp.sum(weights) * (values.size // weights.size)


def _weights(batch: Batch) -> jax.Array:
    return jnp.ones(n_examples(batch)) if batch.weights is None else batch.weights


def _rngs(names: tuple[str, ...], key: jax.Array) -> dict[str, jax.Array]:
    return {name: jax.random.fold_in(key, i) for i, name in enumerate(names)}


def _replica(axis_name: str | None) -> Any:
    return 0 if axis_name is None else jax.lax.axis_index(axis_name)


def _sum(tree: Any, axis_name: str | None) -> Any:
    return tree if axis_name is None else _reduce(jax.lax.psum, tree, axis_name)


def _mean(tree: Any, axis_name: str | None) -> Any:
    return tree if axis_name is None else _reduce(jax.lax.pmean, tree, axis_name)


def _reduce(reduce: Callable[..., Any], tree: Any, axis_name: str) -> Any:
    """Reduces a tree over the replicas."""
    if jax.default_backend() != "cpu":
        return reduce(tree, axis_name)
    # One reduction of a long vector takes half the time of many short ones; XLA combines them
    # by itself elsewhere, but not on CPU.
    return unpack(reduce(pack(tree), axis_name), tree)


def _where(condition: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(
        lambda a, b: a if a is b else jnp.where(condition, a, b),
        new,
        old,
    )
