"""The training step: `(state, batch) -> (state, sums)`, a pure function."""

import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from flaxfit.data._batch import Batch, checked_batch
from flaxfit.modules._functions import WRITTEN
from flaxfit.optim._arguments import with_arguments
from flaxfit.optim._demands import demands_explained
from flaxfit.optim._freeze import carry_over, mask, merge
from flaxfit.optim._spikes import stands_out
from flaxfit.state import TrainState
from flaxfit.step._compare import ForwardPass
from flaxfit.step._divided_batch import DividedBatch, mean_of_sums
from flaxfit.step._forward import returns_weights
from flaxfit.step._gradient import hooked
from flaxfit.step._replicas import replicas_of
from flaxfit.task import TrainTask, as_all_loss, with_penalty
from flaxfit.tree import Function, Params, PyTree, Sums, flat, label_of

# The largest number of elements of an array that is concatenated with others before a sum.
_SMALL = 2**16


def make_train_step(
    task: TrainTask,
    *,
    axis_name: str | None = None,
    virtual_replicas: int | None = None,
    grad_norm: bool = True,
    keep_grads: bool = False,
    skip_empty: bool = True,
    loss_has_weights: bool | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, PyTree]]:
    """Makes the pure update of one training step: `(state, batch) -> (state, sums)`.

    The gradient is that of `sum(w * loss) / sum(w) + penalty` over the whole batch, however the
    examples and their weights are spread over the replicas. A batch whose weights sum to zero
    changes only the step. Loops check that dividing a batch keeps the results; this function
    does not.

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
      axis_name: the mapped axis to reduce over, if the step runs once per replica.
      virtual_replicas: the number of replicas to divide a batch among, with bit-identical results
        on any number of devices. None: one per device.
      grad_norm: whether to report the global norm of the gradients.
      keep_grads: whether to return `(state, (sums, grads))`.
      skip_empty: whether the weights of a batch may sum to zero; False saves the check.
      loss_has_weights: whether the loss returns weights with its values; None: determined by one
        more trace.
    """
    optimizer = with_arguments(task.optimizer)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, PyTree]:
        checked_batch(batch)
        replicas = replicas_of(axis_name, virtual_replicas, state.step)
        has_weights = loss_has_weights
        if has_weights is None:
            has_weights = returns_weights(task, state, batch)
        whole = DividedBatch(task, batch, replicas, skip_empty, has_weights)
        weights = whole.weights(state)
        found = whole.gradient(state, weights)
        grads = replicas.mean(found.grads)
        sums = replicas.sum(found.sums)
        model_state = dict(replicas.average_state(found.model_state))
        written = model_state.pop(WRITTEN, {})
        penalty = whole.mean(found.penalty)
        value = mean_of_sums(sums["loss"], penalty)

        trained = state.replace(params=mask(state.params, task.freeze))
        changed = grads
        passed: dict[str, PyTree] = _arguments(value, grads, whole.loss_function(state))
        if has_hook := task.grads_hook is not None:
            changed = hooked("grads_hook", task.grads_hook, grads, trained, dict(sums))
            passed = {"value": value}  # Gradients computed by the optimizer would bypass the hook.
        with demands_explained(state.opt_state, passed, has_hook=has_hook):
            updated = trained.apply_gradient(optimizer, changed, model_state=model_state, **passed)
        updated = updated.replace(params=carry_over(written, merge(updated.params, state.params)))
        unchanged = state.replace(step=updated.step)
        kept: dict[str, PyTree] = {}  # Fields that change even in a skipped step.
        if found.scale != ():
            kept["scale"] = replicas.least(found.scale)

        is_used = jnp.ones((), jnp.float32)
        may_be_empty = whole.loss_has_weights or skip_empty and batch.weights is not None
        if may_be_empty:
            is_used = jnp.asarray(sum(jax.tree.leaves(weights)) > 0, jnp.float32)
        norm = _norm(jax.tree.leaves(grads))
        if guards(task):
            is_good = _is_finite((grads, changed, sums["loss"]))
            if task.skip_above is not None:
                recent = state.opt_state.recent
                is_spike, advanced = stands_out(recent, value, norm, task.skip_above)
                kept["recent"] = _where(is_good & (is_used > 0), advanced, recent)
                is_good &= ~is_spike
            # Zeroed, since NaN in the sums of a skipped batch would spoil the totals.
            sums = _where(is_good, sums, jax.tree.map(jnp.zeros_like, sums))
            sums["skipped_steps"] = (1 - is_good.astype(jnp.float32),)
            is_used *= is_good.astype(jnp.float32)
        if kept:
            updated, unchanged = (
                each.replace(opt_state=each.opt_state._replace(**kept))
                for each in (updated, unchanged)
            )
        if guards(task) or may_be_empty:
            # A select per array, not a branch: the update is computed, then dropped.
            updated = _where(is_used > 0, updated, unchanged)

        sums = as_all_loss(task.loss, sums, penalty)
        per_step = {"grad_norm": norm} if grad_norm else {}
        if grad_norm and task.grads_hook is not None:
            per_step["hooked_grad_norm"] = _norm(jax.tree.leaves(changed))
        per_step |= _norms_by_pattern(task.norms, grads, updated.params)
        weighted = {name: (value, is_used) for name, value in per_step.items()}
        if penalty is not None:
            weighted["penalty"] = penalty, is_used * whole.n_examples
        sums |= {
            name: (jnp.where(weight > 0, weight * value, 0).astype(jnp.float32), weight)
            for name, (value, weight) in weighted.items()
        }
        sums = with_penalty(task, sums)
        return updated, (sums, grads) if keep_grads else sums

    return train_step


def more_sums(task: TrainTask, result: ForwardPass, *, grad_norm: bool) -> dict[str, Sums]:
    """Returns the shapes of the loss and of the sums that a step adds to its forward pass."""
    one = jax.ShapeDtypeStruct((), "float32")
    names = ["grad_norm"] * grad_norm + ["penalty"] * (result.penalty is not None)
    names += ["hooked_grad_norm"] * (grad_norm and task.grads_hook is not None)
    labels = map(label_of, task.norms)
    names += [f"{kind}/{label}" for label in labels for kind in ("grad_norm", "param_norm")]
    sums = {"loss": result.sums["loss"], **dict.fromkeys(names, (one, one))}
    return with_penalty(task, sums | ({"skipped_steps": (one,)} if guards(task) else {}))


def guards(task: TrainTask) -> bool:
    """Returns whether steps are skipped if they are not finite, or spikes."""
    return task.skip_nonfinite or task.skip_above is not None or task.precision == "float16"


def _arguments(value: jax.Array, grads: Params, loss: Function) -> dict[str, PyTree]:
    """Returns the extra arguments of an optimizer's update, by the names of `OPTAX_ARGUMENTS`."""

    def grad_fn(params: Params, *_: PyTree) -> Params:
        return jax.grad(loss)(params)

    return {"value": value, "grad": grads, "value_fn": loss, "obj_fn": loss, "grad_fn": grad_fn}


def _norms_by_pattern(
    patterns: Sequence[str], grads: Params, params: Params
) -> dict[str, jax.Array]:
    """Computes the norms of gradients and parameters by pattern of their paths."""
    found = {}
    for pattern in patterns:
        for name, tree in ("grad_norm", grads), ("param_norm", params):
            matching = [x for path, x in flat(tree).items() if re.fullmatch(pattern, path)]
            found[f"{name}/{label_of(pattern)}"] = _norm(matching)
    return found


def _norm(leaves: Sequence[jax.Array]) -> jax.Array:
    """Computes `optax.tree.norm(leaves)`, with one sum over all small arrays, which is faster."""
    # Without the barrier, XLA may fuse, and so recompute, the gradients within the sums.
    leaves = jax.lax.optimization_barrier(list(leaves))
    small = [leaf for leaf in leaves if leaf.size <= _SMALL and leaf.dtype == jnp.float32]
    large = [leaf for leaf in leaves if leaf.size > _SMALL or leaf.dtype != jnp.float32]
    joined = [jnp.concatenate([jnp.ravel(leaf) for leaf in small])] if small else []
    return optax.tree.norm([*large, *joined])


def _is_finite(tree: PyTree) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _where(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), new, old)
