"""The gradient of a batch on one replica: at once or in microbatches, of a scaled loss or not."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxfit.data._batch import Batch, n_examples
from flaxfit.optim._freeze import mask, merge
from flaxfit.step._forward import ForwardPass, Sums, forward
from flaxfit.tree._paths import flat
from flaxfit.tree._types import ArrayLike, PyTree


class Gradient(NamedTuple):
    """The gradient of the mean loss, and what the forward pass gave beside it."""

    grads: PyTree
    """Of the trained parameters; frozen ones are left out."""
    sums: Sums
    penalty: Any
    model_state: PyTree
    scale: Any
    """The next `DynamicScale` of the loss; `()` where the loss is not scaled."""


def gradient(
    task: Any, state: PyTree, batch: Batch, key: jax.Array, weight: ArrayLike, replicas: Any
) -> Gradient:
    """The gradient of the weighted loss over this batch, divided by `weight`.

    With `task.accumulate` the batch is worked off in so many parts, one after the other, so that
    the activations of one part are in memory at a time.

    Args:
      task: a `TrainTask`.
      state: the training state.
      batch: the examples of this replica.
      key: the random key of this step and replica; that of part i is `fold_in(key, i)`.
      weight: the weight of the whole batch, or that by output, divided by the number of replicas.
      replicas: the `Replicas` that the whole batch is divided among.
    """
    n_parts = count_parts(n_examples(batch), task.accumulate)
    scale: Any = getattr(state.opt_state, "scale", ()) if task.precision == "float16" else ()
    trained = mask(state.params, task.freeze)
    _check_trainable(trained)

    def of_part(model_state: PyTree, batch: Batch, key: jax.Array) -> Gradient:
        def objective(trained: Any) -> tuple[jax.Array, ForwardPass]:
            params = merge(trained, state.params)
            result = forward(task, params, model_state, batch, key, replicas)
            penalty = 0 if result.penalty is None else result.penalty
            if result.values.ndim == 0:
                return (result.values + penalty) / n_parts, result
            loss, size = result.sums["loss"], result.values.size // n_examples(batch)
            if isinstance(weight, Mapping):
                means = [_divided(loss[name][0], weight[name]) for name in weight]
                mean = jnp.sum(jnp.stack(means))
            else:
                mean = _divided(loss[0], weight * size)
            return mean + penalty / n_parts, result

        if scale == ():
            grads, result = jax.grad(objective, has_aux=True)(trained)
            return Gradient(grads, result.sums, result.penalty, result.model_state, ())
        found = scale.value_and_grad(objective, has_aux=True)(trained)
        result = found.aux[1]
        return Gradient(
            found.grad, result.sums, result.penalty, result.model_state, found.dynamic_scale
        )

    if n_parts == 1:
        return of_part(state.model_state, batch, key)
    return _accumulate(of_part, state.model_state, batch, key, n_parts)


def _check_trainable(trained: Any) -> None:
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


def count_parts(n: int, wanted: int) -> int:
    """The largest number of equal parts of `n` examples, up to the wanted one.

    >>> count_parts(12, 4), count_parts(6, 4), count_parts(7, 4)
    (4, 3, 1)
    """
    return next(parts for parts in range(min(wanted, n), 0, -1) if n % parts == 0)


def _divided(total: jax.Array, weight: jax.Array) -> jax.Array:
    return total / jnp.where(weight > 0, weight, 1)


def _accumulate(
    of_part: Any, model_state: PyTree, batch: Batch, key: jax.Array, n: int
) -> Gradient:
    """Adds up the gradients and the sums of `n` parts; each sees the model state of the last."""
    parts = jax.tree.map(lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]), batch)
    zeros: Any = None
    if not jax.config.jax_disable_jit:  # There the scan is a loop of Python: nothing is traced.
        first = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(of_part, model_state, first, key)
        added = (shapes.grads, shapes.sums, shapes.penalty)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), added)

    def body(carry: PyTree, part: PyTree) -> Any:
        model_state, total = carry
        found = of_part(model_state, part[1], jax.random.fold_in(key, part[0]))
        new = (found.grads, found.sums, found.penalty)
        total = new if total is None else jax.tree.map(jnp.add, total, new)
        return (found.model_state, total), found.scale

    (model_state, total), scales = jax.lax.scan(body, (model_state, zeros), (jnp.arange(n), parts))
    grads, sums, penalty = total
    # Every part began with the same scale; one that overflowed has lowered it.
    scale = jax.tree.map(lambda x: x.min(0), scales)
    penalty = None if penalty is None else penalty / n
    return Gradient(grads, sums, penalty, model_state, scale)
