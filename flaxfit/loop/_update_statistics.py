"""update_statistics: recomputes batch statistics in one pass over data."""

import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from flaxfit.data import one_pass
from flaxfit.data._stream import pass_length
from flaxfit.loop._train_loop import TrainLoop
from flaxfit.state import TrainState
from flaxfit.step import apply_model, rngs_of, step_key
from flaxfit.strategies import DataParallel, Strategy
from flaxfit.task import TrainTask, averaged_by
from flaxfit.tree import Array, Data, PyTree


def update_statistics(
    task: TrainTask,
    state: TrainState,
    data: Data = None,
    *,
    n_steps: int | None = None,
    strategy: Strategy | None = None,
) -> TrainState:
    """Recomputes the statistics of BatchNorm for parameters that were never trained with.

    Averaged parameters, as of `AverageWeights`, produce activations that running statistics never
    saw. Each batch of one pass is normalized as in training, and the collection "batch_stats"
    becomes the mean over the examples; a "var" beside a "mean" also includes the variance of the
    means of batches. With `ema`, the average is used and its statistics are set.

    >>> import flax.linen as nn, numpy as np, optax
    >>> x = np.float32([[1.0], [3.0]])
    >>> task = TrainTask(nn.BatchNorm(), optax.sgd(0.1), "mse", (x, x))
    >>> state = TrainState.create(task.optimizer, nn.BatchNorm(True).init(jax.random.key(0), x))
    >>> state = update_statistics(task, state)
    >>> np.round(state.model_state["batch_stats"]["mean"], 3)
    Array([2.], dtype=float32)

    Args:
      task: the task that trained the parameters.
      state: the state; it is not changed.
      data: the data, with or without targets; None: that of the task.
      n_steps: the number of batches; None: one pass.
      strategy: where to compute, if it is `Sharded`; otherwise one device sees whole batches.

    Raises:
      ValueError: the model has no collection "batch_stats", or the data has no end.
    """
    if "batch_stats" not in state.model_state:
        raise ValueError("The model has no collection 'batch_stats' to update.")

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, PyTree]]:
        def after(statistics: PyTree) -> PyTree:
            model_state = {**state.model_state, "batch_stats": statistics}
            rngs = rngs_of(task.rngs, step_key(state.key, state.step, 0))
            return apply_model(task, state.params, model_state, batch, rngs)[1]["batch_stats"]

        old = state.model_state["batch_stats"]
        low = after(jax.tree.map(jnp.zeros_like, old))
        # Far larger than `low`, so that the rounding of `high - low` hardly changes the momentum.
        start = jax.tree.map(lambda x: (1 + 100 * abs(x)).astype(x.dtype), low)
        found = jax.tree.map(_of_batch, old, low, start, after(start))
        n = next(x.shape[0] for x in jax.tree.leaves(batch) if x.ndim)
        total = state.opt_state + n
        model_state = {**state.model_state, "batch_stats": _merged(old, found, n / total)}
        return state.replace(model_state=model_state, opt_state=total), {}

    if jax.process_count() == 1 and isinstance(strategy, DataParallel | None):
        strategy = DataParallel(jax.local_devices()[:1])
    stream = one_pass(task.roles.of_data_set(task.data if data is None else data))
    if n_steps is None:
        pass_length(stream, "Pass n_steps.")
    own = averaged_by(task, state)
    # In place of an optimizer's state, the number of examples.
    begin = TrainState(jnp.int32(0), own.params, jnp.float32(0), own.model_state, own.key)
    batches = map(task.roles.inputs_of, itertools.islice(stream, n_steps))
    job = TrainTask(step=step, data=batches)
    loop = TrainLoop(begin, job, strategy=strategy, n_steps_per_checkpoint=2**30, stdout=False)
    list(loop)
    found = {"batch_stats": loop.state.model_state["batch_stats"]}
    if getattr(state.opt_state, "statistics", ()):
        kept = state.opt_state._replace(statistics={"model_state": found})
        return state.replace(opt_state=kept)
    return state.replace(model_state={**state.model_state, **found})


def _of_batch(old: Array, low: Array, start: Array, high: Array) -> Array:
    """Returns the statistic of a batch.

    BatchNorm computes `new = momentum * old + (1 - momentum) * batch`. Applied to 0 it gives `low`,
    applied to `start` it gives `high`: two equations for the unknown `momentum` and `batch`.
    """
    if not jnp.issubdtype(old.dtype, jnp.inexact):
        return high
    momentum = (high - low) / start
    return jnp.where(momentum < 1, low / (1 - momentum), old)


def _merged(old: PyTree, new: PyTree, share: Array) -> PyTree:
    """Merges statistics with those of a batch that holds this fraction of the examples.

    Source: Chan, Golub, LeVeque (1979), "Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances".
    """
    if not isinstance(old, Mapping):
        is_float = jnp.issubdtype(old.dtype, jnp.inexact)
        return old + share.astype(old.dtype) * (new - old) if is_float else new
    merged = {name: _merged(old[name], new[name], share) for name in old}
    if "mean" in old and "var" in old:
        between = (share * (1 - share)).astype(old["var"].dtype)
        merged["var"] += between * (new["mean"] - old["mean"]) ** 2
    return merged
