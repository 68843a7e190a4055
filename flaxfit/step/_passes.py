"""The pass over a batch, and the proof that dividing the batch keeps its results."""

import copy
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.core.scope import subtract_filters

from flaxfit.data._batch import Batch
from flaxfit.modules._switch import in_evaluation
from flaxfit.step._batch_loss import losses_by_row, metrics_by_row
from flaxfit.step._companions import Task, with_states
from flaxfit.step._compare import ForwardPass
from flaxfit.step._forward import forward, forward_eval
from flaxfit.step._jaxpr import computes_in_16_bits, equations, holds, names_axis
from flaxfit.step._model_call import with_updates
from flaxfit.step._row_independence import FREE, Kind, OtherProgram, kinds_of_results
from flaxfit.step._trial import CLOSE, COARSE, MODEL, N_ROWS, Pass
from flaxfit.task import EvalTask, TrainTask, in_float32
from flaxfit.tree import Array, Function, PyTree, path_of, shapes_of, tangents, unbound_axis

OBJECTIVE, SUMS = "The objective", "The metric {!r}, whose sums"
_DRAWS = "random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform"
_HIDING = "stop_gradient", "custom_jvp_call"
STATISTICS = "batch_stats"
"""The collection of BatchNorm's running statistics, which depend on the division."""


def has_statistics(task: TrainTask | EvalTask, state: PyTree) -> bool:
    """Returns whether the model normalizes by batch statistics in training."""
    model_state = state.model_state if isinstance(task, TrainTask) else {}
    return isinstance(model_state, Mapping) and STATISTICS in model_state


def pass_of(
    task: TrainTask | EvalTask, *, with_losses: bool = True, evaluates: bool = False
) -> Function:
    """Makes the pass of a task: `(state, batch, states of companions, seed) -> Pass`.

    Rows of a model with batch statistics are computed in evaluation mode: its training mode mixes
    rows by design, which would hide any other mixing.

    Args:
      task: the task to train or to measure.
      with_losses: whether values of the loss must depend on their own row alone.
      evaluates: whether to compute everything in evaluation mode.
    """

    own = own_metrics(task)

    def run(state: PyTree, batch: Batch, states: PyTree, seed: int) -> Pass:
        bound = with_states(task, states)
        bound.__dict__["metrics"] = own  # The sums of the library's metrics are additive.
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
            rows = by_output(measured.outputs)
            rows |= _compared(task, measured.outputs, batch, with_losses)
        return Pass(rows, _sums(bound, measured), kept, result.sown)

    return run


def rows_alone(run: Function) -> Function:
    """Makes a pass without its state and penalty."""
    return lambda *arguments: Pass(*run(*arguments)[:2])


def by_output(outputs: tuple[PyTree, ...]) -> dict[str, PyTree]:
    """Returns the outputs of a model by owner, which names one of several."""
    leaves = jax.tree.leaves_with_path(outputs[0] if len(outputs) == 1 else outputs)
    if len(leaves) < 2:
        return {MODEL: outputs}
    named: dict[str, list[Array]] = {}
    for path, leaf in leaves:  # Keys with "/" may give two leaves one path.
        named.setdefault(f"{MODEL} in its output {path_of(path)!r}", []).append(leaf)
    return named


def with_tangents(run: Function) -> Function:
    """Makes a pass whose rows and penalty also hold their derivatives along a direction.

    A gradient may combine rows although no value does: by `stop_gradient`.
    """

    def both(state: PyTree, batch: Batch, states: PyTree, seed: int) -> Pass:
        leaves, structure = jax.tree.flatten(state.params)

        def at(leaves: list[Array]) -> tuple[tuple[PyTree, PyTree], Pass]:
            params = structure.unflatten(leaves)
            found = run(state.replace(params=params), batch, states, seed)
            return (found.rows, found.penalty), found

        _, slopes, found = jax.jvp(at, (leaves,), (tangents(wave, leaves),), has_aux=True)
        rows, penalty = jax.tree.map(
            lambda x, slope: slope if jnp.issubdtype(x.dtype, jnp.inexact) else x,
            *((found.rows, found.penalty), slopes),
        )
        both_rows = {
            owner: (*(x if isinstance(x, tuple) else (x,)), rows[owner])
            for owner, x in found.rows.items()
        }
        return found._replace(rows=both_rows, penalty=(found.penalty, penalty))

    return both


def wave(x: Array) -> Array:
    """Returns a direction in which to move a parameter, of about its initial size.

    1 / sqrt(fan_in), as in common initializers: activations of deep models stay finite.
    """
    scale = max(1, math.prod(x.shape[:-1])) ** -0.5
    by = jnp.sin(1 + 78.233 * jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
    return (scale * by).astype(x.dtype)


def own_metrics(task: TrainTask | EvalTask) -> dict[str, Any]:
    """Returns the metrics whose sums user code computes, by name."""
    return {
        name: metric
        for name, metric in task.metrics.items()
        if metric.values is None and metric.max_rows is None and not _is_ours(metric.measure)
    }


def comparison_of(task: TrainTask | EvalTask, *, with_losses: bool = True) -> Function:
    """Like `pass_of`, for losses and metrics alone: `batch.inputs` holds the model's outputs."""

    def run(state: PyTree, batch: Batch, states: PyTree, seed: int) -> Pass:
        outputs: Any = batch.inputs
        return Pass(_compared(task, outputs, batch, with_losses))

    return run


def outputs_of(
    task: TrainTask | EvalTask, state: PyTree, batch: Batch, states: PyTree
) -> tuple[PyTree, ...]:
    """Returns the outputs of the model of a task."""
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
    """Computes the values of losses and metrics by example."""
    targets = in_float32(batch.targets)
    each = losses_by_row(task.loss, outputs, targets) if with_losses and task.loss else ()
    losses = {owner: loss(*given, *aims) for owner, loss, given, aims in each}
    return losses | {
        f"The metric {name!r}": values(*outputs, *targets) for name, values in metrics_by_row(task)
    }


def _sums(task: TrainTask | EvalTask, result: ForwardPass) -> dict[str, PyTree]:
    """Returns the sums of the user's metrics, or those that an objective returns."""
    if task.objective is not None:
        others = {"loss", "penalty", *task.metrics}
        return {SUMS.format(k): x for k, x in result.sums.items() if k not in others}
    return {SUMS.format(name): result.sums[name] for name in task.metrics}


def _is_ours(function: Any) -> bool:
    """Returns whether a function is defined in this library, whose sums are additive."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", "").partition(".")[0] == __name__.partition(".")[0]


def _in_evaluation(task: Task) -> Task:
    """Returns a task whose model runs in evaluation mode, or returns zeros if it has none."""
    apply, measure = task.apply, in_evaluation(task.apply)

    def evaluated(variables: PyTree, *inputs: PyTree, **named: PyTree) -> tuple[PyTree, PyTree]:
        # Fixed keys: random numbers that are drawn even in evaluation then hide nothing else.
        keys = jax.tree.map(lambda key: jax.random.key(0), named.get("rngs"))
        # Statistics are immutable: BatchNorm that ignores the mode raises an error.
        mutable = subtract_filters(named.get("mutable", False), [STATISTICS]) or False
        try:
            found = measure(variables, *inputs, **{**named, "rngs": keys, "mutable": mutable})
            return with_updates(found) if mutable else (found, {})
        except Exception:  # The model has no evaluation mode, or needs arguments of training.
            outputs, _ = with_updates(apply(variables, *inputs, **named))
            return jax.tree.map(jnp.zeros_like, outputs), {}

    quiet = copy.copy(task)  # `dataclasses.replace` would resolve all fields again.
    quiet.__dict__["apply"] = evaluated
    return quiet


class Proof(NamedTuple):
    """The result of comparing traces of a pass."""

    is_independent: bool
    """Whether it is proven that dividing the batch keeps the results."""
    draws: bool = True
    """Whether the pass may draw random numbers."""
    names_axis: bool = False
    """Whether the pass names the axis of replicas, and may reduce over it itself."""
    is_same_program: bool = True
    """Whether the traces differ only in sizes, as far as they were compared."""
    close: float = COARSE
    """The tolerance for rounding between programs of different sizes."""
    hides_gradients: bool = True
    """Whether the pass may hide from values what is mixed, by `stop_gradient` or `custom_jvp`."""
    refusal: Exception | None = None
    """The error of tracing the first number of examples, if any."""


def reduces_over(
    axis: str | None, run: Function, state: PyTree, batch: Batch, states: PyTree
) -> bool:
    """Returns whether a pass reduces over a mapped axis itself."""
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
      run: the pass, not bound to an axis of replicas.
      state: the state.
      batch: a batch, or its shapes.
      states: the variables of companions.
      n: the number of examples in the first trace.
      factor: the second trace has `factor * n` examples.
      is_chained: whether each part starts from the model state of the previous one.
    """
    one = None
    try:
        one, found = _traced(run, state, batch, states, n)
        two, _ = _traced(run, state, batch, states, factor * n)
    except NameError as error:
        return Proof(is_independent=False, names_axis=unbound_axis(error) is not None)
    except Exception as error:  # It accepts some batch sizes only.
        return Proof(is_independent=False, refusal=error if one is None else None)
    is_row = jax.tree.map(lambda x: jnp.ndim(x) > 0, batch)
    leaves = [
        *jax.tree.map(lambda x: FREE, jax.tree.leaves(state)),
        *(Kind(0) if each else FREE for each in jax.tree.leaves(is_row)),
        *(FREE for _ in jax.tree.leaves((states, 0))),
    ]
    # The kinds allowed for rows, sums, model state and penalty. No kind proves that sums are
    # additive: those are tried. In a chain, even a state that does not depend on rows may change
    # with each part, as a counter does.
    wanted = ((FREE, Kind(0)), (), () if is_chained else (FREE,), (FREE,))
    allowed = [
        kinds for tree, kinds in zip(found, wanted, strict=True) for _ in jax.tree.leaves(tree)
    ]
    draws, hides = (any(holds(one, name) for name in names) for names in (_DRAWS, _HIDING))
    close = COARSE if computes_in_16_bits(one) else CLOSE
    try:
        kinds = kinds_of_results(one, two, leaves, n, factor)
    except OtherProgram:
        return Proof(False, draws, is_same_program=False, close=close, hides_gradients=hides)
    if all(kind in each for kind, each in zip(kinds, allowed, strict=True)):
        return Proof(is_independent=True, draws=draws)
    try:
        few, _ = _traced(run, state, batch, states, N_ROWS)
        is_same = _operations(few) == _operations(one)
    except Exception:  # It accepts other numbers of examples only.
        is_same = True
    return Proof(False, draws, is_same_program=is_same, close=close, hides_gradients=hides)


def _operations(program: Any) -> list[str]:
    return [equation.primitive.name for equation in equations(program)]


def _traced(run: Function, state: PyTree, batch: Batch, states: PyTree, n: int) -> tuple[Any, Any]:
    resized = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype) if x.shape else x, batch
    )
    arguments = shapes_of((state, resized, states))
    return jax.make_jaxpr(run, return_shape=True)(*arguments, jax.ShapeDtypeStruct((), "int32"))
