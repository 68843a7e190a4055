"""The pure core: one training step is `(state, batch) -> (state, sums)`, and so is measuring."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxfit.data._batch import Batch, call
from flaxfit.optim._freeze import mask, merge
from flaxfit.state._train_state import TrainState
from flaxfit.step._forward import (
    ForwardPass,
    Sums,
    as_outputs,
    forward_eval,
    rngs_of,
    weight_sums,
)
from flaxfit.step._gradient import Gradient, gradient
from flaxfit.step._replicas import Replicas, VirtualReplicas
from flaxfit.task._label_counts import check_counts
from flaxfit.task._multi_output import without_idle_targets
from flaxfit.task._precision import in_precision
from flaxfit.tree._paths import flat
from flaxfit.tree._types import ArrayLike, Function, Json, PyTree

# Added to the position of a batch: the parts of a training step are numbered from 0.
_EVALUATION = 2**31

# Elements of an array whose sum takes less time than to have it computed by itself.
_SMALL = 2**16


def make_train_step(
    task: Any,
    *,
    axis_name: str | None = None,
    virtual_replicas: int | None = None,
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
      virtual_replicas: how many replicas to divide a batch among, in all and on however many
        devices: the results are the same to the bit. None: one for each device.
      grad_norm: whether to report the global norm of the gradients.
      keep_grads: whether to return `(state, (sums, grads))`.
      skip_empty: whether the weights of a batch may sum to zero; False saves the check.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        replicas = _replicas(axis_name, virtual_replicas, state.step)
        weights = replicas.sum(replicas.each(lambda _, part: weight_sums(task.loss, part), batch))
        # Divided by the weight of the whole batch, times the number of replicas: the mean of these
        # over the replicas is the mean over the examples.
        weight = jax.tree.map(lambda total: total / replicas.n, weights)

        def gradient_of(replica: PyTree, part: Batch) -> Gradient:
            part = without_idle_targets(task.loss, part) if skip_empty else part
            key = step_key(state.key, state.step, replica)
            return gradient(task, state, part, key, weight, replicas)

        found = replicas.each(gradient_of, batch)
        grads = replicas.mean(found.grads)
        sums = replicas.sum(found.sums)

        trained = state.replace(params=mask(state.params, task.freeze))
        with _demands_explained():
            updated = trained.apply_gradient(
                task.optimizer, grads, model_state=replicas.average_state(found.model_state)
            )
        updated = updated.replace(params=merge(updated.params, state.params))
        unchanged = state.replace(step=updated.step)
        if found.scale != ():
            scale = replicas.least(found.scale)
            updated, unchanged = (_with_scale(each, scale) for each in (updated, unchanged))

        is_used = jnp.ones((), jnp.float32)
        if skip_empty and batch.weights is not None:
            total_weight = sum(jax.tree.leaves(weights))
            is_used = jnp.asarray(total_weight > 0, jnp.float32)
        if guards(task):
            is_finite = _is_finite((grads, sums["loss"]))
            # What a skipped batch has given is not a number to be added to others.
            sums = _where(is_finite, sums, jax.tree.map(jnp.zeros_like, sums))
            sums["skipped_steps"] = (1 - is_finite.astype(jnp.float32),)
            is_used *= is_finite
        if guards(task) or (skip_empty and batch.weights is not None):
            updated = _where(is_used > 0, updated, unchanged)

        per_step = {"grad_norm": norm(jax.tree.leaves(grads))} if grad_norm else {}
        for pattern in task.norms:
            per_step[f"grad_norm/{pattern}"] = norm_of(grads, pattern)
            per_step[f"param_norm/{pattern}"] = norm_of(updated.params, pattern)
        if found.penalty is not None:
            per_step["penalty"] = replicas.mean(found.penalty)
        sums |= {
            name: (jnp.where(is_used > 0, value, 0).astype(jnp.float32), is_used)
            for name, value in per_step.items()
        }
        return updated, (sums, grads) if keep_grads else sums

    return train_step


@contextlib.contextmanager
def _demands_explained() -> Iterator[None]:
    """Says what an optimizer is given, where it turns out to need more."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        error.add_note(
            "A step calls optimizer.update(gradients, state, params) with mean gradients, and "
            "hands on nothing else. What needs more belongs in a step of your own, "
            "TrainTask(step=...)."
        )
        raise


def more_sums(task: Any, result: ForwardPass, *, grad_norm: bool) -> Sums:
    """The shapes of what a training step adds to the sums of its forward pass."""
    one = jax.ShapeDtypeStruct((), "float32")
    names = ["grad_norm"] * grad_norm + ["penalty"] * (result.penalty is not None)
    names += [f"{kind}/{pattern}" for pattern in task.norms for kind in ("grad_norm", "param_norm")]
    return dict.fromkeys(names, (one, one)) | ({"skipped_steps": (one,)} if guards(task) else {})


def guards(task: Any) -> bool:
    """Whether a step whose loss or gradients are not finite leaves the state as it was."""
    return task.skip_nonfinite or task.precision == "float16"


def make_eval_step(
    task: Any, *, axis_name: str | None = None, virtual_replicas: int | None = None
) -> Callable[..., Sums]:
    """Makes the pure measurement of one batch: `(state, batch, position=0) -> sums`.

    Where the task has `rngs`, their keys depend on the position of the batch in the data.

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
      virtual_replicas: as of `make_train_step`.
    """

    def eval_step(state: TrainState, batch: Batch, position: Json = 0) -> Sums:
        replicas = _replicas(axis_name, virtual_replicas, state.step)

        def sums_of(replica: PyTree, part: Batch) -> Sums:
            key = eval_key(state, position, replica) if task.rngs else None
            return forward_eval(task, state, part, key, replicas).sums

        return replicas.sum(replicas.each(sums_of, batch))

    return eval_step


def make_predict_step(
    apply: Function,
    *,
    precision: str | None = None,
    rngs: Sequence[str] = (),
    axis_name: str | None = None,
    virtual_replicas: int | None = None,
) -> Function:
    """Makes the pure forward pass of one batch: `(state, batch, position=0) -> outputs`.

    >>> import numpy as np
    >>> from flaxfit import InferenceState
    >>> state = InferenceState(np.int32(0), np.float32(3), {})
    >>> float(make_predict_step(lambda v, x: v["params"] * x)(state, Batch((np.float32(2),))))
    6.0

    Args:
      apply: `apply(variables, *inputs)`, such as the `apply` of a module in evaluation mode.
      precision: what to compute in, as of a `TrainTask`.
      rngs: the random streams to supply, as of an `EvalTask`.
      axis_name: the mapped axis, where the step runs once per replica; it matters to `rngs` alone.
      virtual_replicas: as of `make_train_step`; they matter to `rngs` alone.
    """
    apply = in_precision(apply, precision)

    def predict_step(state: TrainState, batch: Batch, position: Json = 0) -> Any:
        def outputs_of(replica: PyTree, inputs: PyTree) -> Any:
            options = {"rngs": rngs_of(rngs, eval_key(state, position, replica))} if rngs else {}
            outputs = call(apply, state.variables, inputs, **options)
            as_outputs(outputs)
            return outputs

        if not rngs or virtual_replicas is None:
            replica = 0 if axis_name is None or not rngs else jax.lax.axis_index(axis_name)
            return outputs_of(replica, batch.inputs)
        replicas = _replicas(axis_name, virtual_replicas, state.step)
        outputs = replicas.each(outputs_of, batch.inputs)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)

    return predict_step


def step_key(key: jax.Array, step: Any, replica: PyTree = 0) -> jax.Array:
    """The random key of a step on a replica: a function of its position, never carried along.

    Stream number `i` of a task's `rngs` is given `fold_in(step_key(...), i)`.

    >>> step_key(jax.random.key(0), step=3, replica=1).shape
    ()
    """
    return jax.random.fold_in(jax.random.fold_in(key, step), replica)


def eval_key(state: PyTree, position: Json, replica: PyTree) -> jax.Array:
    """The random key of a batch in evaluation, other than those of a training step."""
    number = jnp.asarray(position, jnp.uint32) + jnp.uint32(_EVALUATION)
    return jax.random.fold_in(step_key(state.key, state.step, replica), number)


def evaluated(state: PyTree, rngs: Sequence[str], owner: str) -> Any:
    """The part of a state that evaluation needs: with the random key, if there are streams.

    Raises:
      ValueError: there are streams, and the state has no key.
    """
    if not rngs:
        return state.for_inference() if hasattr(state, "for_inference") else state
    if not hasattr(state, "key"):
        raise ValueError(
            f"{owner} needs the random key of a TrainState, got an {type(state).__name__}: pass "
            "the training state, or leave the random streams out."
        )
    return state.replace(opt_state=())


def compute(sums: Sums, metrics: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The values of metrics from their sums, on the host; scalars become floats.

    Sums that no metric claims are `(sum, weight)`, whose value is the mean, or `(count,)`; or a
    mapping of pairs, those of several outputs, whose value is the sum of their means.

    >>> compute({"loss": (np.float32(6), np.float32(4))}, {})
    {'loss': 1.5}

    Args:
      sums: of one step or of several.
      metrics: by name.
      where: they were taken, for the error.

    Raises:
      ValueError: there were labels out of range.
    """
    values, sums = {}, check_counts(sums, where)
    order = [name for name in ("loss", *metrics) if name in sums]
    for name in dict.fromkeys([*order, *sums]):
        parts = sums[name]
        if name in metrics:
            value = metrics[name].compute(parts)
        elif isinstance(parts, Mapping):
            means = [total / weight for total, weight in parts.values() if weight]
            value = np.float64(sum(means) if means else np.nan)
        elif len(parts) == 1:
            value = np.float64(parts[0])
        else:
            value = _mean(*parts)
        if type(value) is not float:
            value = np.asarray(value)
            value = float(value) if value.ndim == 0 else value
        values[name] = value
    return values


def _mean(total: ArrayLike, weight: ArrayLike) -> Any:
    if np.ndim(total) == np.ndim(weight) == 0 and weight:  # What follows takes much longer.
        return float(total) / float(weight)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.float64(total) / np.float64(weight)


def _replicas(axis_name: str | None, n: int | None, step: Any) -> Replicas | VirtualReplicas:
    return Replicas(axis_name) if n is None else VirtualReplicas(n, axis_name, step)


def norm_of(tree: PyTree, pattern: str) -> jax.Array:
    """The Euclidean norm of all the leaves whose paths match a pattern."""
    return norm([x for path, x in flat(tree).items() if re.fullmatch(pattern, path)])


def norm(leaves: Sequence[jax.Array]) -> jax.Array:
    """The Euclidean norm of all elements of some arrays, as `optax.tree.norm`.

    The small arrays are joined first: one sum over them takes less time than one of each.
    """
    small = [leaf for leaf in leaves if leaf.size <= _SMALL and leaf.dtype == jnp.float32]
    large = [leaf for leaf in leaves if leaf.size > _SMALL or leaf.dtype != jnp.float32]
    return optax.tree.norm([*large, *([_joined(small)] if small else [])])


def _joined(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([jnp.ravel(array) for array in arrays])


def _with_scale(state: TrainState, scale: Any) -> TrainState:
    return state.replace(opt_state=state.opt_state._replace(scale=scale))


def _is_finite(tree: PyTree) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _where(condition: Any, new: PyTree, old: PyTree) -> Any:
    return jax.tree.map(
        lambda a, b: a if a is b else jnp.where(condition, a, b),
        new,
        old,
    )
