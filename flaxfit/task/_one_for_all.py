"""One loss for all outputs of a model, bound to them once outputs and targets are known."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

import jax.numpy as jnp

from flaxfit.data._batch import Batch
from flaxfit.losses._names import is_loss
from flaxfit.task._multi_output import LossByOutput, weight_of
from flaxfit.tree import Function, PyTree

Task = TypeVar("Task")


def for_all_outputs(task: Task, outputs: tuple[PyTree, ...], batch: Batch) -> Task:
    """Applies a loss of one output to each of several outputs; else returns the task unchanged.

    Losses of flaxfit or Optax take one output, as do functions that do not accept all outputs and
    targets. There must be as many targets as outputs; mappings are matched by name.
    """
    loss: Any = getattr(task, "loss", None)
    if loss is None or isinstance(loss, LossByOutput):
        return task
    names = _names_of(loss, outputs, batch.targets)
    if not names:
        return task
    if batch.weights is not None and jnp.ndim(batch.weights) > 1:
        raise ValueError(
            f"The batches have weights of shape {jnp.shape(batch.weights)}, but there is one loss "
            f"for the outputs {', '.join(names)}: {_BY_NAME}"
        )
    factor = weight_of(loss, getattr(task, "loss_weights", None))
    found = copy.copy(task)
    by_name = LossByOutput({n: loss for n in names}, dict.fromkeys(names, factor), names)
    vars(found)["loss"] = by_name
    return found


def check_own_weights_of_all(task: object, given: object, weights: PyTree) -> None:
    """Checks that a loss applied by `for_all_outputs` returned no weights."""
    if task is not given and weights is not None:
        raise ValueError(f"One loss for all outputs returns weights with its values: {_BY_NAME}")


_BY_NAME = "give a loss for each, such as loss={'a': 'mse', 'b': 'mse'}, or in a list."


def _names_of(
    loss: Function, outputs: tuple[PyTree, ...], targets: tuple[PyTree, ...]
) -> tuple[str, ...]:
    """Returns the outputs to which a loss applies one by one; none if it takes all of them."""
    n = len(outputs)
    if n == len(targets) == 1 and isinstance(outputs[0], Mapping):
        is_bound = isinstance(targets[0], Mapping) and is_loss(loss)
        return tuple(outputs[0]) if is_bound else ()
    if n != len(targets) or n < 2 or not (is_loss(loss) or _takes(loss, 2) > _takes(loss, 2 * n)):
        return ()
    return tuple(f"output_{i}" for i in range(n))


def _takes(function: Function, n: int) -> bool:
    try:
        inspect.signature(function).bind(*range(n))
    except (TypeError, ValueError):
        return False
    return True
