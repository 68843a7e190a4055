"""Calls the model of a task: its outputs, and the collections that it updates."""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from flax.core import DenyList
from redex.util import expand_to_tuple

from flaxfit.data._batch import Batch, call
from flaxfit.modules._functions import WRITTEN
from flaxfit.optim._averaged import like
from flaxfit.optim._freeze import carry_over
from flaxfit.task import TrainTask, in_float32, in_precision, with_names
from flaxfit.tree import Function, Params, PyTree, Rngs, flat, match


def apply_model(
    task: TrainTask, params: Params, model_state: PyTree, batch: Batch, rngs: Rngs
) -> tuple[PyTree, Mapping[str, PyTree]]:
    """Applies the model in training mode; returns its outputs and updated collections."""
    collections = {name: tree for name, tree in model_state.items() if name != WRITTEN}
    params = carry_over(model_state.get(WRITTEN, {}), params)
    result = call(
        in_precision(task.apply, task.precision),
        {"params": params, **collections},
        batch.inputs,
        rngs=rngs,
        mutable=DenyList(("params", "intermediates")) if task.mutable is None else task.mutable,
    )
    outputs, updates = with_updates(result)
    if written := updates.get(WRITTEN, {}):
        _check_written(task, written)
        before = flat(params)
        kept = _updated("params", written, {path: before[path] for path in written})
        updates = {**updates, WRITTEN: kept}
    return with_names(task, outputs), updates


def with_updates(result: PyTree) -> tuple[PyTree, Mapping[str, PyTree]]:
    """Splits the result of a model into outputs and updated collections."""
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    return result if is_pair else (result, {})


def as_outputs(result: PyTree) -> tuple[PyTree, ...]:
    """Returns the outputs of a model, one or several, as a tuple.

    Raises:
      TypeError: the model returned None.
    """
    if result is None:
        raise TypeError("The model returned None: its call needs a `return` of the outputs.")
    return expand_to_tuple(result)


def which_have_rows(outputs_of: Function, batch: Batch) -> PyTree:
    """Returns a mask of the outputs with an axis of examples: those that grow with the batch."""

    def shapes(factor: int) -> PyTree:
        resized = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((factor * x.shape[0], *x.shape[1:]), x.dtype), batch
        )
        return jax.eval_shape(lambda batch: as_outputs(outputs_of(batch)), resized)

    # Two sizes are traced: one shape cannot tell the batch axis from another axis of that size.
    return jax.tree.map(lambda one, two: one.shape[:1] != two.shape[:1], shapes(1), shapes(2))


def sum_of_penalties(penalty: PyTree, updates: Mapping[str, PyTree]) -> PyTree:
    """Adds the penalty of the loss and the model's `losses`; None if there is neither."""
    penalties = jax.tree.leaves(in_float32((penalty, updates.get("losses", ()))))
    return sum(map(jnp.sum, penalties)) if penalties else None


def updated_state(model_state: PyTree, updates: Mapping[str, PyTree]) -> PyTree:
    """Returns the model state after a call, with the parameters that the call wrote."""
    written = {**model_state.get(WRITTEN, {}), **updates.get(WRITTEN, {})}
    state = {name: _updated(name, updates.get(name, old), old) for name, old in model_state.items()}
    return state | ({WRITTEN: written} if written else {})


def not_added(names: Iterable[str], model_state: Mapping[str, PyTree]) -> dict[str, tuple[()]]:
    """Returns the updated collections that may be meant as terms of the loss."""
    return {name: () for name in sorted(names) if _may_be_loss(name, model_state)}


def _updated(name: str, new: PyTree, old: PyTree) -> PyTree:
    if jax.tree.structure(new) != jax.tree.structure(old):
        changed = ", ".join([*flat(new).keys() ^ flat(old).keys()][:5]) or "its containers"
        raise ValueError(
            f"The collection {name!r} does not keep its structure: the call of the model adds or "
            f"removes {changed}, by `sow` or by an assignment, and would do so in each step. "
            "Create state in __init__ (Linen: setup). If the values are terms of the loss, pass "
            f"Model(..., losses=[{name!r}]), or sow them into 'losses'; else sow them into "
            "'intermediates'."
        )
    new = jax.tree.map(jnp.asarray, new)
    before = flat(old)
    for path, leaf in flat(new).items():
        was = before[path]
        is_float, was_float = (jnp.issubdtype(x.dtype, jnp.inexact) for x in (leaf, was))
        is_rounded = is_float and not was_float
        if leaf.shape != was.shape or is_rounded:
            raise ValueError(
                f"The model changes the state {name}/{path} from {was.dtype}{list(was.shape)} to "
                f"{leaf.dtype}{list(leaf.shape)}, but a step must keep shapes, and must not turn "
                "integers into floats: create the state with its final shape and dtype."
            )
    return like(new, old)


def _check_written(task: TrainTask, written: Params) -> None:
    """Checks that parameters written by a call are frozen and not rounded to 16 bits."""
    frozen = [(pattern, True) for pattern in task.freeze]
    refused, why = [path for path in written if not match(frozen, path)], "are trained"
    advice = "name frozen parameters in freeze=, "
    if not refused and task.precision not in (None, "float32"):
        refused, why = [*written], f"are rounded to 16 bits by precision={task.precision!r}"
        advice = ""
    if refused:
        raise ValueError(
            f"The call of the model writes {', '.join(refused[:5])}, but such parameters {why}, so "
            "the written values would be lost. Keep them in an nnx.Variable of another type than "
            f"nnx.Param, {advice}or write the step with nnx_step."
        )


def _may_be_loss(collection: str, model_state: Mapping[str, PyTree]) -> bool:
    """Returns whether a collection, not "losses", is dropped after a step or named like a loss."""
    if collection in ("params", "losses", "intermediates", WRITTEN):
        return False
    return collection not in model_state or "loss" in collection.lower()
