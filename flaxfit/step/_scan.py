"""The compiled update: one or several steps in one program, with sums added to totals."""

from collections.abc import Container, Mapping

import jax
import jax.numpy as jnp

from flaxfit.data._batch import Batch
from flaxfit.data._sample_weights import times
from flaxfit.state import TrainState
from flaxfit.step import _metric_totals
from flaxfit.step._train_step import make_train_step
from flaxfit.task import TrainTask
from flaxfit.tree import Function, PyTree, Sums


def make_step(task: TrainTask, **options: PyTree) -> Function:
    """Makes the step of a task, or wraps its custom step: `(state, batch) -> (state, sums)`."""
    if task.step is None:
        return make_train_step(task, **options)
    return _own_step(task.step, task.metrics)


def _own_step(step: Function, metrics: Container[str]) -> Function:
    """Wraps a user's step as `(state, batch) -> (state, sums)`.

    It increments the step counter, whether or not the user's function does. A plain number that
    belongs to no metric becomes a sum of weight 1: its mean over the steps is reported.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Sums]]:
        result = step(state, batch)
        is_pair = isinstance(result, tuple) and len(result) == 2
        if not is_pair or not hasattr(result[0], "params") or not isinstance(result[1], Mapping):
            kinds = [type(part).__name__ for part in (result if is_pair else (result,))]
            raise TypeError(
                f"The step of the task returned {' and '.join(kinds)}; expected (state, sums): a "
                "TrainState, and numbers by the names of metrics."
            )
        updated, given = result
        sums = {
            name: sums if name in metrics else _sum_of(name, sums) for name, sums in given.items()
        }
        return updated.replace(step=state.step + 1), sums

    return train_step


def _sum_of(name: str, value: PyTree) -> Sums:
    parts = tuple(value) if isinstance(value, list | tuple) else (value, 1.0)
    if not 1 <= len(parts) <= 2 or any(jnp.ndim(part) for part in parts):
        raise TypeError(
            f"The step of the task returned {value!r:.80} for {name!r}; expected a number, which "
            "is averaged over the steps, or a pair (sum, weight) of numbers."
        )
    return tuple(jnp.asarray(part, jnp.float32) for part in parts)


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
