"""Objectives: losses that call the model themselves, `f(apply, batch, rngs) -> values`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from flaxfit.data._batch import Batch, call, n_examples
from flaxfit.optim._averaged import like
from flaxfit.optim._freeze import merge
from flaxfit.state import TrainState
from flaxfit.step._batch_loss import LossResult
from flaxfit.step._companions import functions_of
from flaxfit.step._compare import ForwardPass, compare, sums_of_loss, weights_of
from flaxfit.step._model_call import apply_model, not_added, sum_of_penalties, updated_state
from flaxfit.step._own_weights import check_own_weights
from flaxfit.step._random import rngs_of
from flaxfit.step._replicas import AnyReplicas
from flaxfit.task import (
    EvalTask,
    TrainTask,
    check_names,
    count_weights,
    in_float32,
    takes_ema,
    valid_weights,
)
from flaxfit.tree import Function, Params, PyTree, Rngs, Sums, beside, fits, joined_weights

_Found = tuple[PyTree, Mapping[str, PyTree], PyTree]
"""Outputs, updated collections, and the new model state."""


@dataclasses.dataclass(eq=False, repr=False)
class Calls:
    """The `apply` of an objective: `apply(*inputs, rngs=None, **named) -> outputs`.

    Each call starts from the model state that the previous call left, and has its own random keys
    unless `rngs` is given. Keys change by Python call: a call traced in a `lax.scan` repeats them.
    A model that updates collections cannot be called within `jax.grad` or similar transformations.
    """

    _run: Callable[[Params, PyTree, PyTree, Rngs], _Found]
    """`(params, model_state, inputs, rngs) -> (outputs, updates, model_state)`."""
    _params: Params
    _average: Params
    """The averaged parameters, for `ema`."""
    model_state: PyTree
    """The collections beside the parameters."""
    _rngs_of_call: Callable[[int], Rngs]
    """`index of the call -> keys by stream`."""
    _number: int = 0
    is_called: bool = False
    outputs: list[PyTree] = dataclasses.field(default_factory=list)
    """The outputs of the model and of companions, in the order of the calls."""
    updates: list[Mapping[str, PyTree]] = dataclasses.field(default_factory=list)

    def __call__(self, *inputs: PyTree, rngs: Rngs | None = None, **named: PyTree) -> PyTree:
        """Applies the model; named inputs are keyword arguments of its call."""
        found = self._applied(self._params, inputs, named, rngs)
        outputs, updates, self.model_state = found
        if updates:
            self.updates.append(updates)
        self.is_called = True
        return outputs

    def ema(self, *inputs: PyTree, rngs: Rngs | None = None, **named: PyTree) -> PyTree:
        """Applies the model with its averaged parameters, without gradients or updates."""
        outputs, *_ = self._applied(self._average, inputs, named, rngs)
        return jax.lax.stop_gradient(outputs)

    def _applied(
        self, params: Params, inputs: PyTree, named: dict[str, PyTree], rngs: Rngs | None
    ) -> _Found:
        if inputs and named:
            raise TypeError(
                "apply takes the inputs of the model by position or by keyword, got both: "
                f"{len(inputs)} and {', '.join(named)}."
            )
        rngs = self._rngs_of_call(self._number) if rngs is None else rngs
        self._number += 1
        found = self._run(params, self.model_state, inputs or named, rngs)
        self._note(found[0])
        return found

    def beside(self, companion: Function) -> Function:
        """Wraps a companion to record its outputs among those of the model."""

        def call(*inputs: PyTree, **named: PyTree) -> PyTree:
            outputs = companion(*inputs, **named)
            self._note(outputs)
            return outputs

        return call

    def _note(self, outputs: PyTree) -> None:
        # Tracers, which must not leave a `jax.grad` in the user's code, as shapes and dtypes.
        self.outputs.append(jax.tree.map(_untraced, outputs))


def objective_pass(task: TrainTask, state: TrainState, batch: Batch, key: jax.Array) -> ForwardPass:
    """Computes the objective of a task, which calls the model in training mode."""

    def run(params: Params, model_state: PyTree, inputs: PyTree, rngs: Rngs) -> _Found:
        outputs, updates = apply_model(task, params, model_state, Batch(inputs), rngs)
        return in_float32(outputs), updates, updated_state(model_state, updates)

    params, model_state = state.params, state.model_state
    average = like(merge(state.opt_state.average, params), params) if takes_ema(task) else params
    keys = functools.partial(_rngs_of_call, task.rngs, key)
    calls = Calls(run, params, average, model_state, keys)
    result = _objective_sums(task, calls, batch, rngs_of(task.rngs, key))
    penalties = [sum_of_penalties(None, updates) for updates in calls.updates]
    sown = sum_of_penalties(None, {"losses": penalties})
    names = {name for updates in calls.updates for name in updates}
    return result._replace(
        penalty=sown,
        sown=sown,
        model_state=calls.model_state,
        not_added=not_added(names, model_state),
    )


def objective_measured(
    task: EvalTask,
    apply: Function,
    state: PyTree,
    batch: Batch,
    key: jax.Array | None,
    options: Mapping[str, PyTree],
    replicas: AnyReplicas,
) -> ForwardPass:
    """Computes the objective of a task in evaluation mode, and the metrics of model outputs."""

    def run(params: Params, model_state: PyTree, inputs: PyTree, rngs: Rngs) -> _Found:
        given = {**options, "rngs": rngs} if rngs else options
        return in_float32(call(apply, state.variables, inputs, **given)), {}, model_state

    # Evaluation measures one set of weights, which `ema` uses as well.
    calls = Calls(run, (), (), (), functools.partial(_rngs_of_call, task.rngs, key))
    result = _objective_sums(task, calls, batch, options.get("rngs", {}))
    if not task.metrics:
        return result
    outputs = call(apply, state.variables, batch.inputs, **options)
    measured = compare(task, outputs, batch, replicas)
    return result._replace(sums=result.sums | measured.sums)


def _objective_sums(
    task: TrainTask | EvalTask, calls: Calls, batch: Batch, rngs: Rngs
) -> ForwardPass:
    """Calls the objective of a task; returns its values, and the sums of values and aux."""
    batch = batch._replace(targets=in_float32(batch.targets))
    weights = weights_of(batch)
    named = {name: calls.beside(each) for name, each in functions_of(task).items()}
    if takes_ema(task):
        named["ema"] = calls.ema
    objective: Any = task.objective
    try:
        result, aux = _called(functools.partial(objective, **named), calls, batch, rngs)
    except KeyError as error:
        if (name := error.args[0]) not in rngs and isinstance(name, str):
            streams = ", ".join(rngs) or "none"
            option = f"rngs={(*rngs, name)} of the Model or TrainTask names more"
            if isinstance(task, EvalTask):
                option = f"eval_rngs={(*rngs, name)} of the Model, rngs= of an EvalTask, names more"
            error.add_note(f"The random streams of the objective are {streams}: {option}.")
        raise
    if not calls.is_called:
        raise ValueError(
            "The objective did not call the model: compute its values from apply(*batch.inputs)."
        )
    if result.weights is not None:
        check_own_weights("the objective", _replayed(task, rngs), tuple(calls.outputs), (batch,))
    sums = count_weights(result.weights)
    result = result._replace(weights=valid_weights(result.weights))
    sums["loss"] = sums_of_loss(None, result, weights, (), batch)
    sums |= _sums_of_aux(aux, weights, result.weights)
    return ForwardPass(result.values, sums, (), result.weights)


def _replayed(task: TrainTask | EvalTask, rngs: Rngs) -> Function:
    """Converts an objective to `(*outputs of its calls, batch) -> values`, to trace it alone."""
    objective: Any = task.objective

    def function(*outputs_and_batch: PyTree) -> PyTree:
        *outputs, batch = outputs_and_batch
        left = iter(outputs)

        def apply(*inputs: PyTree, **named: PyTree) -> PyTree:
            return next(left)

        def ema(*inputs: PyTree, **named: PyTree) -> PyTree:
            return jax.lax.stop_gradient(next(left))

        named = dict.fromkeys(task.companions, apply) | ({"ema": ema} if takes_ema(task) else {})
        return objective(apply, batch, rngs, **named)

    return function


def _rngs_of_call(names: Sequence[str], key: jax.Array | None, number: int) -> Rngs:
    """Returns the keys of a call of the model; the first call has those of a plain loss."""
    if key is None:
        return {}
    # Streams fold in 0, ..., len(names) - 1, so calls fold in larger numbers: no key repeats.
    return rngs_of(names, jax.random.fold_in(key, len(names) + number) if number else key)


def _called(
    objective: Any, calls: Calls, batch: Batch, rngs: Rngs
) -> tuple[LossResult, Mapping[str, PyTree]]:
    """Calls an objective; returns its checked values and weights, and its further results.

    Raises:
      TypeError: it returned something other than values, weights and a mapping.
      ValueError: there is not one value per example, or the weights do not fit the values.
    """
    n, found = n_examples(batch), objective(calls, batch, rngs)
    parts: list[Any] = list(found) if isinstance(found, tuple) else [found]
    kinds = ", ".join(type(part).__name__ for part in parts)
    parts = [part for i, part in enumerate(parts) if part is not None or not i]
    aux = parts.pop() if len(parts) > 1 and isinstance(parts[-1], Mapping) else {}
    is_array = all(hasattr(part, "shape") for part in parts)
    if not 1 <= len(parts) <= 2 or not is_array or not all(part.ndim for part in parts[1:]):
        raise TypeError(
            f"The objective returned {kinds}; expected values of shape ({n}, ...), or a tuple "
            "(values, aux), (values, weights) or (values, weights, aux), where aux is a mapping. "
            "A penalty is not supported: add it to the values."
        )
    values, *weights = in_float32(tuple(map(jnp.asarray, parts)))
    if values.shape[:1] != (n,):
        raise ValueError(
            f"The objective returned values of shape {values.shape}; expected one value per "
            f"example, of shape ({n},) or ({n}, ...): leave out the mean, so that weights, padding "
            "and several devices are exact."
        )
    own = None
    if weights:
        own = beside(jnp.asarray(weights[0], float), values.shape, "The objective")
    return LossResult(values, own), in_float32(dict(aux))


def _sums_of_aux(
    aux: Mapping[str, PyTree], weights: jax.Array, own: jax.Array | None
) -> dict[str, Sums]:
    """Returns `(sum, weight)` by name for the further results of an objective.

    Values are weighted like those of the objective, including its `own` weights if they fit.
    """
    found = {}
    check_names(aux)
    for name, value in jax.lax.stop_gradient(dict(aux)).items():
        parts: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
        if len(parts) == 2 and not any(map(jnp.ndim, parts)):
            found[name] = tuple(jnp.asarray(part, jnp.float32) for part in parts)
        elif len(parts) == 1 and jnp.shape(parts[0])[:1] == weights.shape[:1]:
            values = jnp.asarray(parts[0], jnp.float32)
            factor = jnp.ones(len(values))
            if own is not None and fits(own.shape, values.shape):
                factor = own
            w = joined_weights(factor, weights, values.shape, f"aux[{name!r}]")
            found[name] = jnp.sum(jnp.where(w != 0, w * values, 0)), jnp.sum(w)
        else:
            raise ValueError(
                f"The objective reports {name!r} of shape {jnp.shape(parts[0])}; expected one "
                f"value per example, of shape ({len(weights)}, ...), whose mean is reported, or a "
                "pair (sum, weight) of numbers, which are added."
            )
    return found


def _untraced(x: jax.Array) -> jax.Array | jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, Tracer) else x
