"""The pass over a batch whose results a division must keep, and the proof that it keeps them."""

import copy
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax.core.scope import subtract_filters

from flaxfit.data._batch import Batch
from flaxfit.modules._switch import in_evaluation
from flaxfit.step._batch_loss import losses_by_row, metrics_by_row
from flaxfit.step._companions import with_states
from flaxfit.step._compare import ForwardPass
from flaxfit.step._forward import forward, forward_eval
from flaxfit.step._jaxpr import computes_in_16_bits, equations, holds, names_axis
from flaxfit.step._model_call import with_updates
from flaxfit.step._rows_apart import FREE, Kind, OtherProgram, kinds_of_results
from flaxfit.step._trial import CLOSE, COARSE, N_ROWS, Pass
from flaxfit.task import EvalTask, TrainTask, in_float32
from flaxfit.tree import Function, PyTree, shapes_of, unbound_axis

MODEL, OBJECTIVE, SUMS = "The model", "The objective", "The metric {!r}, whose sums"
_DRAWS = "random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform"
STATISTICS = "batch_stats"
"""The collection of the statistics that BatchNorm keeps, which depend on the division."""

Task = TypeVar("Task", bound=TrainTask | EvalTask)


def has_statistics(task: TrainTask | EvalTask, state: PyTree) -> bool:
    """Whether the model of a task normalizes by statistics of the batch in training."""
    model_state = state.model_state if isinstance(task, TrainTask) else {}
    return isinstance(model_state, Mapping) and STATISTICS in model_state


def pass_of(
    task: TrainTask | EvalTask, *, with_losses: bool = True, evaluates: bool = False
) -> Function:
    """Makes the pass of a task: `(state, batch, states of companions, seed) -> Pass`.

    A model with statistics of the batch has its rows computed in evaluation mode, so that other
    combinations of rows show.

    Args:
      task: what to train or to measure.
      with_losses: whether a value of the loss has to depend on its own row alone.
      evaluates: whether to compute all in evaluation mode; no state and no penalty, unless those
        of training depend on statistics of the batch.
    """

    own = own_metrics(task)

    def run(state: PyTree, batch: Batch, states: PyTree, seed: int) -> Pass:
        bound = with_states(task, states)
        bound.__dict__["metrics"] = own  # The sums of others add up.
        is_noisy = has_statistics(task, state)
        result = _forward(_in_evaluation(bound) if evaluates else bound, state, batch, seed)
        measured = result
        if is_noisy and not evaluates:
            measured = _forward(_in_evaluation(bound), state, batch, seed)
        kept = result.model_state if isinstance(task, TrainTask) else {}
        kept = {name: each for name, each in kept.items() if name != STATISTICS}
        if task.objective is not None:
            rows = {OBJECTIVE: (measured.values, measured.weights)}
        else:
            rows = {MODEL: measured.outputs} | _compared(task, measured.outputs, batch, with_losses)
        sums = _sums(bound, measured)
        if evaluates and not is_noisy:
            return Pass(rows, sums)
        return Pass(rows, sums, kept, result.sown)

    return run


def own_metrics(task: TrainTask | EvalTask) -> dict[str, Any]:
    """The metrics whose sums a function of the user's own computes, by name."""
    return {
        name: metric
        for name, metric in task.metrics.items()
        if metric.values is None and metric.max_rows is None and not _is_ours(metric.measure)
    }


def comparison_of(task: TrainTask | EvalTask, *, with_losses: bool = True) -> Function:
    """As `pass_of`, for a batch whose inputs are the outputs of the model: losses and metrics."""

    def run(state: PyTree, batch: Batch, states: PyTree, seed: int) -> Pass:
        outputs: Any = batch.inputs
        return Pass(_compared(task, outputs, batch, with_losses))

    return run


def outputs_of(
    task: TrainTask | EvalTask, state: PyTree, batch: Batch, states: PyTree
) -> tuple[PyTree, ...]:
    """The outputs of the model of a task."""
    return _forward(with_states(task, states), state, batch, 0).outputs


def _forward(task: TrainTask | EvalTask, state: PyTree, batch: Batch, seed: int) -> ForwardPass:
    if isinstance(task, TrainTask):
        return forward(task, state, batch, jax.random.fold_in(state.key, seed))
    return forward_eval(
        task, state, batch, jax.random.fold_in(state.key, seed) if task.rngs else None
    )


def _compared(
    task: TrainTask | EvalTask, outputs: tuple[PyTree, ...], batch: Batch, with_losses: bool
) -> dict[str, PyTree]:
    """The values of losses and metrics by example."""
    targets = in_float32(batch.targets)
    each = losses_by_row(task.loss, outputs, targets) if with_losses and task.loss else ()
    losses = {owner: loss(*given, *aims) for owner, loss, given, aims in each}
    return losses | {
        f"The metric {name!r}": values(*outputs, *targets) for name, values in metrics_by_row(task)
    }


def _sums(task: TrainTask | EvalTask, result: ForwardPass) -> dict[str, PyTree]:
    """The sums of metrics of the user's own, and those that an objective returns."""
    if task.objective is not None:
        others = {"loss", "penalty", *task.metrics}
        return {SUMS.format(k): x for k, x in result.sums.items() if k not in others}
    return {SUMS.format(name): result.sums[name] for name in task.metrics}


def _is_ours(function: Any) -> bool:
    """Whether a function is one of the library, whose sums add up."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", "").partition(".")[0] == __name__.partition(".")[0]


def _in_evaluation(task: Task) -> Task:
    """The task with its model in evaluation mode; with zeros for outputs if that is not known."""
    apply, measure = task.apply, in_evaluation(task.apply)

    def evaluated(variables: PyTree, *inputs: PyTree, **named: PyTree) -> tuple[PyTree, PyTree]:
        # The same numbers for each seed: what is drawn in evaluation, too, hides nothing else.
        keys = jax.tree.map(lambda key: jax.random.key(0), named.get("rngs"))
        # Where BatchNorm has no such mode, it then raises an error.
        mutable = subtract_filters(named.get("mutable", False), [STATISTICS])
        try:
            found = measure(variables, *inputs, **{**named, "rngs": keys, "mutable": mutable})
            return with_updates(found) if mutable else (found, {})
        except Exception:  # The loop calls the model in a way of its own, or knows no mode.
            outputs, _ = with_updates(apply(variables, *inputs, **named))
            return jax.tree.map(jnp.zeros_like, outputs), {}

    quiet = copy.copy(task)  # `dataclasses.replace` would resolve all fields again.
    quiet.__dict__["apply"] = evaluated
    return quiet


class Proof(NamedTuple):
    """What two traces of a pass show."""

    is_apart: bool
    """Whether they prove that dividing the batch keeps the results."""
    draws: bool = True
    """Whether numbers are drawn at random, as far as that is known."""
    names_axis: bool = False
    """Whether it names the axis of replicas, and may combine these by itself."""
    is_alike: bool = True
    """Whether the programs differ in sizes alone, as far as they were compared."""
    close: float = COARSE
    """How much the results of such programs may differ by rounding."""


def reduces_over(
    axis: str | None, run: Function, state: PyTree, batch: Batch, states: PyTree
) -> bool:
    """Whether a pass combines the replicas of an axis by itself, where one is mapped."""
    if axis is None:
        return False
    given = *shapes_of((state, batch, states)), jax.ShapeDtypeStruct((), "int32")
    return names_axis(jax.make_jaxpr(run, axis_env=[(axis, 2)])(*given))


def prove(
    run: Function,
    state: PyTree,
    batch: Batch,
    states: PyTree,
    n: int,
    factor: int,
    *,
    is_chained: bool = False,
) -> Proof:
    """Tries to prove from two traces that dividing the batch keeps the results of a pass.

    Args:
      run: the pass; where an axis of replicas is mapped, without that axis.
      state: the state.
      batch: a batch, or its shapes.
      states: the variables of companions.
      n: the number of examples to trace, at least 2.
      factor: how many times as many to trace then.
      is_chained: whether parts compute one after the other, each from the state of the one before.
    """
    try:
        one, found = _traced(run, state, batch, states, n)
        two, _ = _traced(run, state, batch, states, factor * n)
    except NameError as error:
        return Proof(is_apart=False, names_axis=unbound_axis(error) is not None)
    except Exception:  # It takes one batch size only, or needs values.
        return Proof(is_apart=False)
    is_row = jax.tree.map(lambda x: jnp.ndim(x) > 0, batch)
    leaves = [
        *jax.tree.map(lambda x: FREE, jax.tree.leaves(state)),
        *(Kind(0) if each else FREE for each in jax.tree.leaves(is_row)),
        *(FREE for _ in jax.tree.leaves((states, 0))),
    ]
    # Every result with what it may be. No rule tells sums, which are tried.
    wanted = ((FREE, Kind(0)), (), () if is_chained else (FREE,), (FREE,))
    allowed = [
        kinds for tree, kinds in zip(found, wanted, strict=True) for _ in jax.tree.leaves(tree)
    ]
    draws = any(holds(one, name) for name in _DRAWS)
    close = COARSE if computes_in_16_bits(one) else CLOSE
    try:
        kinds = kinds_of_results(one, two, leaves, n, factor)
    except OtherProgram:
        return Proof(is_apart=False, draws=draws, is_alike=False, close=close)
    if all(kind in each for kind, each in zip(kinds, allowed, strict=True)):
        return Proof(is_apart=True, draws=draws)
    try:
        few, _ = _traced(run, state, batch, states, N_ROWS)
        is_alike = _operations(few) == _operations(one)
    except Exception:  # It takes other numbers of examples only.
        is_alike = True
    return Proof(False, draws, is_alike=is_alike, close=close)


def _operations(program: Any) -> list[str]:
    return [equation.primitive.name for equation in equations(program)]


def _traced(run: Function, state: PyTree, batch: Batch, states: PyTree, n: int) -> tuple[Any, Any]:
    resized = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype) if x.shape else x, batch
    )
    arguments = shapes_of((state, resized, states))
    return jax.make_jaxpr(run, return_shape=True)(*arguments, jax.ShapeDtypeStruct((), "int32"))
