"""The training step as it is dispatched: one or several steps, their sums added to totals."""

from typing import Any

import jax
import jax.numpy as jnp

from flaxfit.data._batch import Batch
from flaxfit.data._sample_weights import times
from flaxfit.step import _metric_totals
from flaxfit.step._custom_step import make_own_step
from flaxfit.step._train_step import make_train_step
from flaxfit.tree._types import Function, PyTree


def make_step(task: Any, **options: Any) -> Function:
    """Makes the training step of a task, its own where it has one: `(state, batch) -> ...`."""
    return make_train_step(task, **options) if task.step is None else make_own_step(task)


def make_update(
    task: Any,
    *,
    axis_name: str | None,
    n_steps: int = 1,
    keep_grads: bool = False,
    **options: Any,
) -> Function:
    """Makes `(state, totals, batch) -> (state, totals, grads)`.

    With several steps, the leaves of `batch` carry one batch per step as their first axis.
    Where the data is on the devices, the update is `(state, totals, data, batch)`, and the only
    input of `batch` are the indices of its examples.
    """
    step = make_step(task, axis_name=axis_name, keep_grads=keep_grads, **options)

    def update(state: PyTree, totals: PyTree, *batch: PyTree) -> Any:
        state, sums = step(state, batch[0] if len(batch) == 1 else gather(*batch))
        sums, grads = sums if keep_grads else (sums, None)
        return state, _metric_totals.add(totals, sums), grads

    def update_many(state: PyTree, totals: PyTree, *batches: PyTree) -> Any:
        *data, stacked = batches

        def body(carry: PyTree, batch: PyTree) -> Any:
            state, totals, grads = update(carry[0], carry[1], *data, batch)
            return (state, totals), grads

        (state, totals), grads = jax.lax.scan(body, (state, totals), stacked)
        return state, totals, jax.tree.map(lambda g: g[-1], grads)

    return update if n_steps == 1 else update_many


def gather(data: Batch, batch: Batch) -> Batch:
    """The batch whose examples stand at the indices that are the only input of `batch`."""
    (rows,) = batch.inputs

    def take(x: jax.Array) -> jax.Array:
        return x.at[rows].get(mode="promise_in_bounds")

    picked = jax.tree.map(take, data)
    if picked.weights is None:
        return picked._replace(weights=batch.weights)
    weights = jax.tree.map(lambda each: jnp.asarray(each, jnp.float32), picked.weights)
    return picked._replace(
        weights=weights if batch.weights is None else times(weights, batch.weights)
    )
