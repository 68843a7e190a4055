"""Validates a task on its first batch by tracing it."""

import contextlib
import functools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import InvalidRngError

from flaxfit.data._batch import Batch, n_examples
from flaxfit.data._sample_weights import check_weights
from flaxfit.step._batch_loss import losses_by_row, metrics_by_row
from flaxfit.step._broadcasting import check_by_row, check_sums
from flaxfit.step._companions import states_of, taking_states
from flaxfit.step._compare import ForwardPass
from flaxfit.step._error_messages import calls_explained, tracers_explained
from flaxfit.step._forward import forward, forward_eval
from flaxfit.step._hints import check_classes, hints_of
from flaxfit.step._jaxpr import holds, n_operations
from flaxfit.step._own_weights import check_own_weights
from flaxfit.task import (
    EvalTask,
    TrainTask,
    check_adds_loss,
    check_outputs,
    check_values,
    for_all_outputs,
    in_float32,
    targets_with_weights,
)
from flaxfit.tree import (
    Array,
    Function,
    PyTree,
    Sums,
    flat,
    runs_eagerly,
    shapes_of,
    structure_of,
    which_count,
)

_ACROSS = " If it is meant to compare examples of a batch, set across='batch' in the task."


class Traced(NamedTuple):
    """The results of tracing a function."""

    shapes: PyTree
    """The shapes and dtypes of its results."""
    has_convolutions: bool
    n_operations: float
    """An estimate, see `n_operations`."""
    values: PyTree = None
    """The results of a function that was run eagerly instead of traced."""
    program: Any = None
    """The jaxpr of a function that was traced."""
    hints: Sequence[str] = ()
    """Descriptions of probable mistakes."""


def inspect(
    task: TrainTask | EvalTask,
    state: PyTree,
    batch: Batch,
    data: Batch | None = None,
    bind: Function = lambda function: function,
    known: dict[Hashable, Any] | None = None,
    *,
    is_resumed: bool = False,
) -> Traced:
    """Validates a task on its first batch by tracing one forward pass.

    Args:
      task: the task to train or to measure.
      state: the state to train or to measure.
      batch: the first batch, as the user passed it.
      data: all data, if available, to check its values; None: those of the batch are checked.
      bind: the `bind` of the strategy.
      known: a cache of traces of this task, by shapes; extended in place.
      is_resumed: whether the run was resumed. The values of the batch are then not checked, since
        an uninterrupted run would not have checked them.

    Returns:
      The trace, with the shapes of a `ForwardPass`.

    Raises:
      ValueError: labels, weights, the shape of the loss or a random stream do not fit.
      TypeError: the batch lacks the targets that the loss needs.
    """
    check_outputs(task.loss, batch.weights)
    if data is not None or not is_resumed:
        _check_data(task, batch, data)

    known, key = {} if known is None else known, structure_of((state, batch))
    traced = known.get(key)
    if traced is None:
        with calls_explained(batch.inputs, batch.targets), _explained(task, batch):
            traced = trace(bind(taking_states(task, _pass_of)), state, batch, states_of(task))
    result = traced.shapes
    check_adds_loss(task, result.penalty)
    task = for_all_outputs(task, result.outputs, batch)
    if result.values is not None:
        if task.loss is not None:
            check_values(task.loss, result.outputs, data or batch)
        if result.values.ndim == 0 and batch.weights is not None:
            raise ValueError(
                "Weights cannot be applied to a loss that returns a scalar: return one value per "
                f"example, of shape ({n_examples(batch)},), without taking the mean."
            )
    check_classes(task, batch)
    if key not in known:
        if traced.program is not None:
            _check_by_row(task, result, batch, bind)
            given = result.outputs, shapes_of(in_float32(batch.targets))
            if result.weights is not None and task.loss is not None:
                check_own_weights("the loss", bind(task.loss), *given)
            for name, values in metrics_by_row(task):
                check_own_weights(f"the metric {name!r}", bind(values), *given)
        if isinstance(task, TrainTask):
            convolves = traced.has_convolutions
            hints = hints_of(state.params, batch, data or batch, convolves=convolves)
            traced = traced._replace(hints=tuple(hints))
        known[key] = traced = traced._replace(values=None, program=None)
    return traced


def _pass_of(task: TrainTask | EvalTask) -> Function:
    def run(state: PyTree, batch: Batch) -> ForwardPass:
        if isinstance(task, EvalTask):
            return forward_eval(task, state, batch, state.key if task.rngs else None)
        return forward(task, state, batch, state.key)

    return run


def inspect_step(
    task: TrainTask,
    step: Function,
    state: PyTree,
    batch: Batch,
    data: Batch | None = None,
    bind: Function = lambda function: function,
) -> Traced:
    """Validates a user's step on its first batch by tracing it.

    Returns:
      The trace, with the shapes of its sums.

    Raises:
      ValueError: the returned state does not match the input, or the batch has weights by output.
    """
    if isinstance(batch.weights, Mapping):
        names = ", ".join(map(repr, batch.weights))
        raise ValueError(
            f"The batches have weights for the outputs {names}, which a custom "
            "step does not support: pass one weight per example, or put others among the targets."
        )
    _check_data(task, batch, data)
    with tracers_explained():
        traced = trace(bind(step), state, batch)
    updated, sums = traced.shapes
    old, new = (
        {path: f"{x.dtype}{list(x.shape)}" for path, x in flat(tree).items()}
        for tree in (state, updated)
    )
    if old != new or jax.tree.structure(state) != jax.tree.structure(updated):
        paths = [path for path in {**old, **new} if old.get(path) != new.get(path)]
        lines = [f"  {p}: {old.get(p, '-')} became {new.get(p, '-')}" for p in paths[:30]]
        raise ValueError(
            "The step of the task returned a state that does not match its input:\n"
            + "\n".join(lines or ["  other containers hold its arrays"])
        )
    return traced._replace(shapes=sums)


def trace(function: Function, *arguments: PyTree) -> Traced:
    """Traces a function on arrays, or on their shapes and dtypes.

    An eager function is run instead, so that user code sees concrete values.
    """
    if runs_eagerly(function):
        values = function(*arguments)
        return Traced(shapes_of(values), False, math.inf, values)
    # Only shapes: the arrays of a state may be spread over devices and processes.
    program, results = jax.make_jaxpr(function, return_shape=True)(*map(shapes_of, arguments))
    has_convolutions = holds(program, "conv_general_dilated")
    return Traced(results, has_convolutions, n_operations(program), program=program)


@contextlib.contextmanager
def streams_explained(owner: str, rngs: Sequence[str]) -> Iterator[None]:
    """Explains where to name a missing random stream, in place of Flax's error."""
    try:
        yield
    except InvalidRngError as error:
        raise ValueError(
            "The model needs a random stream that was not supplied: "
            f"{error}\n{owner} supplies {list(rngs)}: add its name."
        ) from error


@contextlib.contextmanager
def _explained(task: TrainTask | EvalTask, batch: Batch) -> Iterator[None]:
    """Explains errors of a model or a loss that lacks random streams or targets."""
    owner, source = f"TrainTask(..., rngs={task.rngs})", "the data"
    if isinstance(task, EvalTask):
        owner = "EvalTask(..., rngs=...) or Model(..., eval_rngs=...)"
        source = "the validation or evaluation data"
    try:
        with tracers_explained(), streams_explained(owner, task.rngs):
            yield
    except TypeError as error:
        if not batch.targets and "argument" in str(error):
            shapes = [str(leaf.shape) for leaf in jax.tree.leaves(batch.inputs)]
            raise TypeError(
                f"The loss needs targets, but {source} holds only inputs of shape "
                f"{', '.join(shapes)}. Pass targets as well: fit(x, y), evaluate(x, y), "
                "validation_data=(x, y), or batches (x, y); for mappings, name the column: "
                "targets='label'."
            ) from error
        raise


def _check_by_row(
    task: TrainTask | EvalTask, result: ForwardPass, batch: Batch, bind: Function
) -> None:
    """Checks that the loss and the metrics compare each output with its own target."""
    outputs, targets = result.outputs, batch.targets
    for name, metric in task.metrics.items():
        if metric.max_rows is None and any(
            leaf.ndim for leaf in jax.tree.leaves(result.sums[name])
        ):
            check_sums(name, bind(functools.partial(_measured, metric)), outputs, targets)
    if not task.pad:
        return
    checked = [
        (f"The metric {name!r}", values, outputs, targets) for name, values in metrics_by_row(task)
    ]
    if task.loss is not None:
        checked += losses_by_row(task.loss, outputs, targets)
    for owner, function, *arguments in checked:
        check_by_row(owner, bind(function), *arguments, advice=_ACROSS)


def _measured(metric: Any, weights: Array, *outputs_and_targets: PyTree) -> Sums:
    return metric.measure(*outputs_and_targets, weights=weights)


def _check_data(task: TrainTask | EvalTask, batch: Batch, data: Batch | None) -> None:
    """Checks the values of all data, or of the first batch if `data` is None."""
    name = "The first batch" if data is None else "The data"
    check_weights_of(data or batch, name)
    if task.check_finite:
        check_finite(data or batch, name, task.loss)


def check_weights_of(batch: Batch, name: str) -> None:
    """Checks that no weight is NaN, infinite or negative."""
    if isinstance(batch.weights, Mapping):
        for output, weights in batch.weights.items():
            check_weights(weights, f"{name} holds weights for {output!r}, which")
    elif batch.weights is not None:
        check_weights(batch.weights, f"{name} holds weights, which")


def check_finite(batch: Batch, name: str, loss: Any = None) -> None:
    """Checks that inputs, and targets of nonzero weight, are finite."""
    targets = (("target", *each) for each in targets_with_weights(loss, batch))
    for role, tree, weights in ("input", batch.inputs, None), *targets:
        for path, leaf in flat(tree).items():
            bad = _rows_not_finite(leaf, weights)
            if np.any(bad):
                raise ValueError(
                    f"{name} holds NaN or infinite values: {role} {path!r}, {np.sum(bad):,} of "
                    f"{np.size(bad):,} rows, the first of them row {np.argmax(bad):,}. Clean the "
                    "data, or replace the values (np.nan_to_num). If they have a meaning, such as "
                    "a missing label, set check_finite=False in the task."
                )


def _rows_not_finite(leaf: Array, weights: Array | None) -> np.ndarray | bool:
    """Returns a mask of the rows with weighted values that are not finite; False if none are."""
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.sum(leaf)):
            return False
    bad = np.atleast_1d(~np.isfinite(np.asarray(leaf)))
    if weights is not None and weights.shape[:1] == bad.shape[:1]:
        bad &= which_count(np.asarray(weights), leaf.shape)
    return bad.reshape(len(bad), -1).any(1)
