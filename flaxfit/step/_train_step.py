"""The training step: `(state, batch) -> (state, sums)`, a pure function."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import optax

from flaxfit.data._batch import Batch
from flaxfit.data._sample_weights import without_idle_targets
from flaxfit.optim._freeze import mask, merge
from flaxfit.state._train_state import TrainState
from flaxfit.step._forward import ForwardPass, weight_sums
from flaxfit.step._gradient import Gradient, accumulated_gradient, gradient, weight_of_loss
from flaxfit.step._random import step_key
from flaxfit.step._replicas import replicas_of
from flaxfit.step._whole_batch import weight_of_whole_loss, whole_batch_gradient
from flaxfit.task._task import TrainTask
from flaxfit.tree._paths import flat
from flaxfit.tree._selection import label_of
from flaxfit.tree._types import ArrayLike, Params, PyTree, Sums

# Elements of an array that is joined with others to be summed in one operation.
_SMALL = 2**16


def make_train_step(
    task: TrainTask,
    *,
    axis_name: str | None = None,
    virtual_replicas: int | None = None,
    grad_norm: bool = True,
    keep_grads: bool = False,
    skip_empty: bool = True,
    loss_has_weights: bool = False,
) -> Callable[[TrainState, Batch], tuple[TrainState, PyTree]]:
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
      loss_has_weights: whether the loss returns weights with its values.
    """
    gradient_of_part = gradient if task.accumulate == 1 else accumulated_gradient
    if task.accumulate > 1 and task.across == "batch":
        gradient_of_part = whole_batch_gradient

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, PyTree]:
        replicas = replicas_of(axis_name, virtual_replicas, state.step)

        def weight_of(replica: ArrayLike, part: Batch) -> PyTree:
            if not loss_has_weights:
                return weight_sums(task.loss, part)
            key = step_key(state.key, state.step, replica)
            find = weight_of_loss if task.across is None else weight_of_whole_loss
            return find(task, state, part, key, replicas)

        weights = replicas.sum(replicas.each(weight_of)(batch))
        # Divided by the weight of the whole batch, times the number of replicas: the mean over the
        # replicas is then the mean over the examples.
        weight = jax.tree.map(lambda total: total / replicas.n, weights)

        def gradient_of(replica: ArrayLike, part: Batch) -> Gradient:
            part = without_idle_targets(part) if skip_empty else part
            key = step_key(state.key, state.step, replica)
            return gradient_of_part(task, state, part, key, weight, replicas)

        found = replicas.each(gradient_of)(batch)
        grads = replicas.mean(found.grads)
        sums = replicas.sum(found.sums)
        model_state = replicas.average_state(found.model_state)

        trained = state.replace(params=mask(state.params, task.freeze))
        with _demands_explained():
            updated = trained.apply_gradient(task.optimizer, grads, model_state=model_state)
        updated = updated.replace(params=merge(updated.params, state.params))
        unchanged = state.replace(step=updated.step)
        if found.scale != ():
            scale = replicas.least(found.scale)
            updated, unchanged = (_with_scale(each, scale) for each in (updated, unchanged))

        is_used = jnp.ones((), jnp.float32)
        may_be_empty = loss_has_weights or skip_empty and batch.weights is not None
        if may_be_empty:
            is_used = jnp.asarray(sum(jax.tree.leaves(weights)) > 0, jnp.float32)
        if guards(task):
            is_finite = _is_finite((grads, sums["loss"]))
            # The sums of a skipped batch must not spoil the totals.
            sums = _where(is_finite, sums, jax.tree.map(jnp.zeros_like, sums))
            sums["skipped_steps"] = (1 - is_finite.astype(jnp.float32),)
            is_used *= is_finite
        if guards(task) or may_be_empty:
            updated = _where(is_used > 0, updated, unchanged)

        per_step = {"grad_norm": _norm(jax.tree.leaves(grads))} if grad_norm else {}
        for pattern in task.norms:
            label = label_of(pattern)
            per_step[f"grad_norm/{label}"] = _norm_of(grads, pattern)
            per_step[f"param_norm/{label}"] = _norm_of(updated.params, pattern)
        if found.penalty is not None:
            per_step["penalty"] = replicas.mean(found.penalty)
        sums |= {
            name: (jnp.where(is_used > 0, value, 0).astype(jnp.float32), is_used)
            for name, value in per_step.items()
        }
        return updated, (sums, grads) if keep_grads else sums

    return train_step


def more_sums(task: TrainTask, result: ForwardPass, *, grad_norm: bool) -> dict[str, Sums]:
    """The shapes of what a training step adds to the sums of its forward pass."""
    one = jax.ShapeDtypeStruct((), "float32")
    names = ["grad_norm"] * grad_norm + ["penalty"] * (result.penalty is not None)
    labels = map(label_of, task.norms)
    names += [f"{kind}/{label}" for label in labels for kind in ("grad_norm", "param_norm")]
    return dict.fromkeys(names, (one, one)) | ({"skipped_steps": (one,)} if guards(task) else {})


def guards(task: TrainTask) -> bool:
    """Whether a step whose loss or gradients are not finite leaves the state unchanged."""
    return task.skip_nonfinite or task.precision == "float16"


@contextlib.contextmanager
def _demands_explained() -> Iterator[None]:
    """Adds what an optimizer is called with to the errors of one that needs more."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        error.add_note(
            "A step calls optimizer.update(gradients, state, params) with mean gradients, and "
            "hands on nothing else. What needs more belongs in a step of your own, "
            "TrainTask(step=...)."
        )
        raise


def _norm_of(tree: Params, pattern: str) -> jax.Array:
    return _norm([x for path, x in flat(tree).items() if re.fullmatch(pattern, path)])


def _norm(leaves: Sequence[jax.Array]) -> jax.Array:
    """The Euclidean norm of all elements, as `optax.tree.norm`, with small arrays joined.

    One sum over the joined arrays takes less time than one of each.
    """
    small = [leaf for leaf in leaves if leaf.size <= _SMALL and leaf.dtype == jnp.float32]
    large = [leaf for leaf in leaves if leaf.size > _SMALL or leaf.dtype != jnp.float32]
    joined = [jnp.concatenate([jnp.ravel(leaf) for leaf in small])] if small else []
    return optax.tree.norm([*large, *joined])


def _with_scale(state: TrainState, scale: PyTree) -> TrainState:
    return state.replace(opt_state=state.opt_state._replace(scale=scale))


def _is_finite(tree: PyTree) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _where(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), new, old)
