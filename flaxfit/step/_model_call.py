"""The call of a task's model: its outputs, and the collections that it updates."""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from flax.core import DenyList
from redex.util import expand_to_tuple

from flaxfit.data._batch import Batch, call
from flaxfit.optim._averaged import like
from flaxfit.task._output_metrics import with_names
from flaxfit.task._precision import in_float32, in_precision
from flaxfit.task._task import TrainTask
from flaxfit.tree._types import Function, Params, PyTree, Rngs


def apply_model(
    task: TrainTask, params: Params, model_state: PyTree, batch: Batch, rngs: Rngs
) -> tuple[PyTree, Mapping[str, PyTree]]:
    """The outputs of the model in training, and the collections that it updates."""
    result = call(
        in_precision(task.apply, task.precision),
        {"params": params, **model_state},
        batch.inputs,
        rngs=rngs,
        mutable=DenyList(("params", "intermediates")) if task.mutable is None else task.mutable,
    )
    outputs, updates = with_updates(result)
    return with_names(task, outputs), updates


def with_updates(result: PyTree) -> tuple[PyTree, Mapping[str, PyTree]]:
    """The outputs of a model that may update collections, and these."""
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    return result if is_pair else (result, {})


def as_outputs(result: PyTree) -> tuple[PyTree, ...]:
    """The outputs of a model, one or several, as a tuple.

    Raises:
      TypeError: there are none.
    """
    if result is None:
        raise TypeError("The model returned None: its call needs a `return` of the outputs.")
    return expand_to_tuple(result)


def which_have_rows(outputs_of: Function, batch: Batch) -> PyTree:
    """Which outputs of a model have an axis of examples: those that grow with the batch."""

    def shapes(factor: int) -> PyTree:
        resized = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((factor * x.shape[0], *x.shape[1:]), x.dtype), batch
        )
        return jax.eval_shape(lambda batch: as_outputs(outputs_of(batch)), resized)

    return jax.tree.map(lambda one, two: one.shape[:1] != two.shape[:1], shapes(1), shapes(2))


def sum_of_penalties(penalty: PyTree, updates: Mapping[str, PyTree]) -> PyTree:
    """The penalty of the loss and the model's `losses`; None if there is neither."""
    penalties = jax.tree.leaves(in_float32((penalty, updates.get("losses", ()))))
    return sum(map(jnp.sum, penalties)) if penalties else None


def updated_state(model_state: PyTree, updates: Mapping[str, PyTree]) -> PyTree:
    """The collections of a model state, as a model has updated them."""
    return {name: _updated(name, updates.get(name, old), old) for name, old in model_state.items()}


def not_added(names: Iterable[str], model_state: Mapping[str, PyTree]) -> dict[str, tuple[()]]:
    """The collections among those updated whose values may be meant as terms of the loss."""
    return {name: () for name in sorted(names) if _may_be_loss(name, model_state)}


def _updated(name: str, new: PyTree, old: PyTree) -> PyTree:
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise ValueError(
            f"The collection {name!r} does not keep its structure: each step would add to what "
            f"`sow` has left there. If it holds terms of the loss, Model(..., losses=[{name!r}]) "
            "adds them, as it does those in 'losses'; else sow into 'intermediates'."
        )
    return like(new, old)


def _may_be_loss(collection: str, model_state: Mapping[str, PyTree]) -> bool:
    """Whether a collection that is not "losses" is dropped, or is a loss by its name."""
    if collection in ("params", "losses", "intermediates"):
        return False
    return collection not in model_state or "loss" in collection.lower()
