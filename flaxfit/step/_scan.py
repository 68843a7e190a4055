"""The compiled update: one or several steps in one program, with sums added to totals."""

import jax
import jax.numpy as jnp

from flaxfit.data._batch import Batch
from flaxfit.data._sample_weights import times
from flaxfit.step import _metric_totals
from flaxfit.step._custom_step import make_own_step
from flaxfit.step._train_step import make_train_step
from flaxfit.task import TrainTask
from flaxfit.tree import Function, PyTree


def make_step(task: TrainTask, **options: PyTree) -> Function:
    """Makes the step of a task, or wraps its custom step: `(state, batch) -> (state, sums)`."""
    if task.step is None:
        return make_train_step(task, **options)
    return make_own_step(task.step, task.metrics)


def make_update(
    task: TrainTask, *, n_steps: int = 1, keep_grads: bool = False, **options: PyTree
) -> Function:
    """Makes `(state, totals, batch) -> (state, totals, grads)`.

    With several steps, the first axis of `batch` counts steps. For resident data the update is
    `(state, totals, data, batch)`, and the only input of `batch` is the indices of its examples.
    """
    step = make_step(task, keep_grads=keep_grads, **options)

    def update(state: PyTree, totals: PyTree, *data_and_batch: PyTree) -> PyTree:
        *data, batch = data_and_batch

        def one_step(carry: PyTree, batch: Batch) -> PyTree:
            state, totals = carry
            state, sums = step(state, gather(data[0], batch) if data else batch)
            sums, grads = sums if keep_grads else (sums, None)
            return (state, _metric_totals.add(totals, sums)), grads

        if n_steps == 1:
            (state, totals), grads = one_step((state, totals), batch)
        else:
            (state, totals), grads = jax.lax.scan(one_step, (state, totals), batch)
            grads = jax.tree.map(lambda each: each[-1], grads)
        return state, totals, grads

    return update


def gather(data: Batch, batch: Batch) -> Batch:
    """Gathers the examples of a batch of indices from resident data."""
    (rows,) = batch.inputs
    # Rows of the data, in bounds by construction: no clamping or filling is needed.
    picked = jax.tree.map(lambda x: x.at[rows].get(mode="promise_in_bounds"), data)
    if picked.weights is None:
        return picked._replace(weights=batch.weights)
    weights = jax.tree.map(lambda each: jnp.asarray(each, jnp.float32), picked.weights)
    return picked._replace(
        weights=weights if batch.weights is None else times(weights, batch.weights)
    )
