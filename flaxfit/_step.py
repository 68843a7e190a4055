"""The pure core: one training step is `(state, batch) -> (state, sums)`, and so is measuring."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxfit._batch import Batch, call
from flaxfit._forward import (
    ForwardPass,
    Sums,
    evaluate_loss,
    forward_eval,
    loss_sums,
    measure,
    weights_of,
)
from flaxfit._gradient import gradient
from flaxfit._precision import in_precision
from flaxfit._rules import flat
from flaxfit._state import TrainState
from flaxfit._totals import pack, unpack
from flaxfit.optim._freeze import mask, merge


def make_train_step(
    task: Any,
    *,
    axis_name: str | None = None,
    grad_norm: bool = True,
    norms: Sequence[str] = (),
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
      norms: patterns of parameter paths, whose gradients' and parameters' norms to report.
      keep_grads: whether to return `(state, (sums, grads))`.
      skip_empty: whether the weights of a batch may sum to zero; False saves the check.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        key = step_key(state.key, state.step, _replica(axis_name))
        total_weight = _sum(jnp.sum(weights_of(batch)), axis_name)
        n_replicas = 1 if axis_name is None else jax.lax.psum(1, axis_name)
        # Divided by the weight of the whole batch, times the number of replicas: the mean of these
        # over the replicas is the mean over the examples.
        found = gradient(task, state, batch, key, total_weight / n_replicas)
        grads = _mean(found.grads, axis_name)
        sums = _sum(found.sums, axis_name)

        trained = state.replace(params=mask(state.params, task.freeze))
        updated = trained.apply_gradient(
            task.optimizer, grads, model_state=average_state(found.model_state, axis_name)
        )
        updated = updated.replace(params=merge(updated.params, state.params))
        unchanged = state.replace(step=updated.step)
        if found.scale != ():
            scale = _reduce(jax.lax.pmin, found.scale, axis_name) if axis_name else found.scale
            updated, unchanged = (_with_scale(each, scale) for each in (updated, unchanged))

        is_used = jnp.ones(())
        if skip_empty and batch.weights is not None:
            is_used = jnp.where(total_weight > 0, 1.0, 0.0)
        if guards(task):
            is_finite = _is_finite((grads, sums["loss"]))
            # What a skipped batch has given is not a number to be added to others.
            sums = _where(is_finite, sums, jax.tree.map(jnp.zeros_like, sums))
            sums["skipped_steps"] = (1 - is_finite.astype(jnp.float32),)
            is_used *= is_finite
        if guards(task) or (skip_empty and batch.weights is not None):
            updated = _where(is_used > 0, updated, unchanged)

        per_step = {"grad_norm": optax.tree.norm(grads)} if grad_norm else {}
        for pattern in norms:
            per_step[f"grad_norm/{pattern}"] = norm_of(grads, pattern)
            per_step[f"param_norm/{pattern}"] = norm_of(updated.params, pattern)
        if found.penalty is not None:
            per_step["penalty"] = _mean(found.penalty, axis_name)
        sums |= {
            name: (jnp.where(is_used > 0, value, 0), is_used) for name, value in per_step.items()
        }
        return updated, (sums, grads) if keep_grads else sums

    return train_step


def more_sums(
    task: Any, result: ForwardPass, *, grad_norm: bool, norms: Sequence[str] = ()
) -> Sums:
    """The shapes of what a training step adds to the sums of its forward pass."""
    one = jax.ShapeDtypeStruct((), "float32")
    names = ["grad_norm"] * grad_norm + ["penalty"] * (result.penalty is not None)
    names += [f"{kind}/{pattern}" for pattern in norms for kind in ("grad_norm", "param_norm")]
    return dict.fromkeys(names, (one, one)) | ({"skipped_steps": (one,)} if guards(task) else {})


def guards(task: Any) -> bool:
    """Whether a step whose loss or gradients are not finite leaves the state as it was."""
    return task.skip_nonfinite or task.precision == "float16"


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
        key = None
        if task.rngs:
            key = step_key(state.key, state.step, _replica(axis_name))
        outputs = forward_eval(task, state, batch, key)
        weights = weights_of(batch)
        sums = measure(task.metrics, outputs, batch.targets, weights)
        if task.loss is not None:
            values, _ = evaluate_loss(task.loss, outputs, batch)
            sums["loss"] = loss_sums(values, weights)
        return _sum(sums, axis_name)

    return eval_step


def make_predict_step(
    apply: Callable[..., Any], *, precision: str | None = None
) -> Callable[[TrainState, Batch], Any]:
    """Makes the pure forward pass of one batch: `(state, batch) -> outputs`.

    >>> import numpy as np
    >>> from flaxfit import InferenceState
    >>> state = InferenceState(np.int32(0), np.float32(3), {})
    >>> float(make_predict_step(lambda v, x: v["params"] * x)(state, Batch((np.float32(2),))))
    6.0

    Args:
      apply: `apply(variables, *inputs)`, such as the `apply` of a module in evaluation mode.
      precision: what to compute in, as of a `TrainTask`.
    """
    apply = in_precision(apply, precision)

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

    Sums that no metric claims are `(sum, weight)`, whose value is the mean, or `(count,)`.

    >>> compute({"loss": (np.float32(6), np.float32(4))}, {})
    {'loss': 1.5}
    """
    values = {}
    sums = jax.tree.map(np.asarray, sums)
    order = [name for name in ("loss", *metrics) if name in sums]
    for name in dict.fromkeys([*order, *sums]):
        parts = sums[name]
        if name in metrics:
            value = np.asarray(metrics[name].compute(parts))
        elif len(parts) == 1:
            value = np.float64(parts[0])
        else:
            with np.errstate(invalid="ignore", divide="ignore"):
                value = np.float64(parts[0]) / np.float64(parts[1])
        values[name] = float(value) if value.ndim == 0 else value
    return values


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


def norm_of(tree: Any, pattern: str) -> jax.Array:
    """The Euclidean norm of all the leaves whose paths match a pattern."""
    return optax.tree.norm([x for path, x in flat(tree).items() if re.fullmatch(pattern, path)])


def _with_scale(state: TrainState, scale: Any) -> TrainState:
    return state.replace(opt_state=state.opt_state._replace(scale=scale))


def _is_finite(tree: Any) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _where(condition: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(
        lambda a, b: a if a is b else jnp.where(condition, a, b),
        new,
        old,
    )
