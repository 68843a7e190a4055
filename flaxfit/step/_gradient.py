"""The gradient of the loss on one replica, of a whole batch or of parts one after the other."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flaxfit.data._batch import Batch, n_examples
from flaxfit.optim._freeze import mask, merge
from flaxfit.state._train_state import TrainState
from flaxfit.step._forward import ForwardPass, forward, weights_of
from flaxfit.step._replicas import AnyReplicas
from flaxfit.task._task import TrainTask
from flaxfit.tree._paths import flat
from flaxfit.tree._types import Function, Params, PyTree, Sums


class Gradient(NamedTuple):
    """The gradient of the mean loss, and the other results of the forward pass."""

    grads: Params
    """Of the trained parameters; frozen ones are left out."""
    sums: dict[str, Sums]
    penalty: jax.Array | None
    model_state: PyTree
    scale: PyTree
    """The next `DynamicScale` of the loss; `()` where the loss is not scaled."""


def gradient(
    task: TrainTask,
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    weight: PyTree,
    replicas: AnyReplicas,
    n_parts: int = 1,
) -> Gradient:
    """Differentiates the weighted loss of one part of a batch, divided by `weight`.

    `weight` is that of the whole batch, or by output, divided by the number of replicas.
    """
    scale: PyTree = getattr(state.opt_state, "scale", ()) if task.precision == "float16" else ()
    trained = mask(state.params, task.freeze)
    _check_trainable(trained)

    def objective(trained: Params) -> tuple[jax.Array, ForwardPass]:
        params = merge(trained, state.params)
        result = forward(task, params, state.model_state, batch, key, replicas)
        penalty = 0 if result.penalty is None else result.penalty
        if result.values.ndim == 0:
            return (result.values + penalty) / n_parts, result
        loss = result.sums["loss"]
        if isinstance(weight, Mapping):
            mean = jnp.sum(jnp.stack([_divided(loss[name][0], weight[name]) for name in weight]))
        elif result.weights is not None:
            mean = _divided(loss[0], weight)
        else:
            mean = _divided(loss[0], weight * (result.values.size // weights_of(batch).size))
        return mean + penalty / n_parts, result

    if scale == ():
        grads, result = jax.grad(objective, has_aux=True)(trained)
    else:
        found = scale.value_and_grad(objective, has_aux=True)(trained)
        scale, grads, result = found.dynamic_scale, found.grad, found.aux[1]
    return Gradient(grads, result.sums, result.penalty, result.model_state, scale)


def accumulated_gradient(
    task: TrainTask,
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    weight: PyTree,
    replicas: AnyReplicas,
) -> Gradient:
    """Adds up the gradients of `task.accumulate` parts, computed one after the other.

    Only the activations of one part are in memory. Part i has the random key `fold_in(key, i)`,
    and the model state that the part before it returned.
    """
    n = count_parts(n_examples(batch), task.accumulate)
    if n == 1:
        return gradient(task, state, batch, key, weight, replicas)

    def of_part(model_state: PyTree, part: Batch, key: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        at_part = state.replace(model_state=model_state)
        found = gradient(task, at_part, part, key, weight, replicas, n)
        return found.model_state, (found.grads, found.sums, found.penalty), found.scale

    model_state, total, scales = _over_parts(of_part, n, state.model_state, batch, key)
    grads, sums, penalty = total
    # Every part began with the same scale; one that overflowed has lowered it.
    scale = jax.tree.map(lambda x: x.min(0), scales)
    return Gradient(grads, sums, None if penalty is None else penalty / n, model_state, scale)


def weight_of_loss(
    task: TrainTask, state: TrainState, batch: Batch, key: jax.Array, replicas: AnyReplicas
) -> PyTree:
    """The sum of the weights that the loss returns, or that by output, times those of the batch.

    The gradient is divided by it, so it is found first, by a forward pass of which the compiler
    removes all that the weights do not depend on.
    """

    def of_part(model_state: PyTree, part: Batch, key: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        result = forward(task, state.params, model_state, part, key, replicas)
        loss = result.sums["loss"]
        is_by_output = isinstance(loss, Mapping)
        weight = {name: each[1] for name, each in loss.items()} if is_by_output else loss[1]
        return result.model_state, weight, ()

    n = count_parts(n_examples(batch), task.accumulate)
    if n == 1:
        return of_part(state.model_state, batch, key)[1]
    return _over_parts(of_part, n, state.model_state, batch, key)[1]


def _over_parts(
    of_part: Function, n: int, model_state: PyTree, batch: Batch, key: jax.Array
) -> tuple[PyTree, PyTree, PyTree]:
    """Calls `of_part(model_state, part, key) -> (model_state, added, listed)` on `n` parts.

    Returns the last model state, the sum of what is added, and what is listed, stacked.
    """
    parts = jax.tree.map(lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]), batch)
    zeros: PyTree = None
    if not jax.config.jax_disable_jit:  # There the scan is a loop of Python: nothing is traced.
        first = jax.tree.map(lambda x: x[0], parts)
        _, added, _ = jax.eval_shape(of_part, model_state, first, key)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), added)

    def add_part(carry: PyTree, numbered: tuple[jax.Array, Batch]) -> PyTree:
        (model_state, total), (number, part) = carry, numbered
        model_state, new, listed = of_part(model_state, part, jax.random.fold_in(key, number))
        total = new if total is None else jax.tree.map(jnp.add, total, new)
        return (model_state, total), listed

    start = (model_state, zeros)
    (model_state, total), listed = jax.lax.scan(add_part, start, (jnp.arange(n), parts))
    return model_state, total, listed


def count_parts(n: int, wanted: int) -> int:
    """The largest number of equal parts of `n` examples, up to the wanted one."""
    return next(parts for parts in range(min(wanted, n), 0, -1) if n % parts == 0)


def _check_trainable(trained: Params) -> None:
    whole = [
        f"{path} ({leaf.dtype})"
        for path, leaf in flat(trained).items()
        if not jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    if whole:
        raise ValueError(
            f"Cannot train {', '.join(whole[:5])}: only floating-point parameters have gradients. "
            "Name their paths in freeze=, or keep them in another collection than params."
        )


def _divided(total: jax.Array, weight: jax.Array) -> jax.Array:
    return total / jnp.where(weight > 0, weight, 1)
