"""The forward passes of a task: its loss or objective and its metrics on one batch."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from flaxfit.data._batch import Batch, call, n_examples
from flaxfit.modules._switch import handle_of
from flaxfit.state import TrainState
from flaxfit.step._compare import ForwardPass, compare
from flaxfit.step._model_call import (
    apply_model,
    not_added,
    sum_of_penalties,
    updated_state,
    which_have_rows,
    with_updates,
)
from flaxfit.step._objective import objective_measured, objective_pass
from flaxfit.step._random import rngs_of
from flaxfit.step._replicas import AnyReplicas, Replicas
from flaxfit.task import EvalTask, TrainTask, as_all_loss, in_precision, with_names, with_penalty
from flaxfit.tree import PyTree, parameters

_ALONE = Replicas(None)


def forward(
    task: TrainTask,
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    replicas: AnyReplicas = _ALONE,
) -> ForwardPass:
    """Applies the model in training mode, then the loss and the metrics to its outputs."""
    if task.objective is not None:
        return objective_pass(task, state, batch, key)

    def updated_by(batch: Batch) -> tuple[PyTree, Mapping[str, PyTree]]:
        rngs = rngs_of(task.rngs, key)
        return apply_model(task, state.params, state.model_state, batch, rngs)

    outputs, updates = updated_by(batch)
    result = compare(
        task,
        outputs,
        batch,
        replicas,
        rows_of=lambda: which_have_rows(lambda part: updated_by(part)[0], batch),
    )
    return result._replace(
        penalty=sum_of_penalties(result.penalty, updates),
        sown=sum_of_penalties(None, updates),
        model_state=updated_state(state.model_state, updates),
        not_added=not_added(updates, state.model_state),
    )


def returns_weights(task: TrainTask, state: TrainState, batch: Batch) -> bool:
    """Returns whether the loss or the objective returns weights with its values; traces it."""

    def weights(state: TrainState, batch: Batch) -> PyTree:
        return forward(task, state, batch, state.key).weights

    return jax.eval_shape(weights, state, batch) is not None


def forward_eval(
    task: EvalTask,
    state: PyTree,
    batch: Batch,
    key: jax.Array | None,
    replicas: AnyReplicas = _ALONE,
) -> ForwardPass:
    """Applies the model in evaluation mode, then the loss and the metrics to its outputs."""
    options = {} if key is None else {"rngs": rngs_of(task.rngs, key)}
    apply = in_precision(task.apply, task.precision)
    if task.objective is not None:
        return objective_measured(task, apply, state, batch, key, options, replicas)

    adds_losses = _adds_losses(task)

    def updated_by(batch: Batch) -> tuple[PyTree, Mapping[str, PyTree]]:
        mutable = {"mutable": ["losses"]} if adds_losses else {}
        found = call(apply, state.variables, batch.inputs, **mutable, **options)
        outputs, updates = with_updates(found) if adds_losses else (found, {})
        return with_names(task, outputs), updates

    outputs, updates = updated_by(batch)
    result = compare(
        task,
        outputs,
        batch,
        replicas,
        rows_of=lambda: which_have_rows(lambda part: updated_by(part)[0], batch),
    )
    penalty = sum_of_penalties(result.penalty, updates)
    sums = as_all_loss(task.loss, result.sums, penalty)
    if penalty is not None:
        n = jnp.asarray(n_examples(batch), jnp.float32)
        sums = sums | {"penalty": (n * penalty, n)}
    sown = sum_of_penalties(None, updates)
    return result._replace(penalty=penalty, sown=sown, sums=with_penalty(task, sums))


def _adds_losses(task: EvalTask) -> bool:
    """Returns whether to request the model's own losses, through `mutable`."""
    if handle_of(task.apply) is not None:
        return True
    taken = parameters(task.apply)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    return task.penalty_in_loss and (takes_all or "mutable" in taken)
