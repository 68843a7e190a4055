"""The companions of a task: arguments of a compiled program, and functions for an objective."""

import copy
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import numpy as np
from flax.errors import FlaxError, InvalidRngError

from flaxfit.state import InferenceState
from flaxfit.task import Companion, EvalTask, TrainTask, in_float32, in_precision
from flaxfit.tree import ArrayLike, Function, PyTree

Task = TypeVar("Task", bound=TrainTask | EvalTask)
States = Mapping[str, InferenceState]
"""The variables of companions by name, as states: strategies shard them like parameters."""


def states_of(task: TrainTask | EvalTask) -> dict[str, InferenceState]:
    """Returns the variables of the companions of a task."""
    return {
        name: jax.tree.map(_as_array, InferenceState.create(each.variables))
        for name, each in task.companions.items()
    }


def with_states(task: Task, states: States) -> Task:
    """Returns a task whose companions have these variables, such as traced arguments."""
    bound = copy.copy(task)  # `dataclasses.replace` would resolve all fields again.
    bound.__dict__["companions"] = {
        name: task.companions[name]._replace(variables=state.variables)
        for name, state in states.items()
    }
    return bound


def taking_states(task: Task, make: Callable[[Task], Function]) -> Function:
    """Converts `make(task)(*arguments)` to a function `(*arguments, states)`."""

    def function(*arguments: PyTree) -> PyTree:
        *others, states = arguments
        return make(with_states(task, states))(*others)

    return function


def functions_of(task: TrainTask | EvalTask) -> dict[str, Function]:
    """Returns the companions of a task as functions `(*inputs, **named) -> outputs`, by name."""
    return {name: _bound(name, each, task.precision) for name, each in task.companions.items()}


def _as_array(x: ArrayLike) -> ArrayLike:
    is_array = isinstance(x, jax.Array)
    return x if is_array else np.asarray(x, jax.dtypes.canonicalize_dtype(np.asarray(x).dtype))


def _bound(name: str, companion: Companion, precision: str | None) -> Function:
    apply = in_precision(companion.apply, precision)

    def call(*inputs: PyTree, **named: PyTree) -> PyTree:
        try:
            return in_float32(apply(companion.variables, *inputs, **named))
        except InvalidRngError:
            raise
        except (FlaxError, AttributeError, LookupError, TypeError, ValueError) as error:
            shapes = jax.tree.map(lambda x: getattr(x, "shape", x), (inputs, named))
            told = repr(error) if isinstance(error, LookupError) else error
            raise ValueError(
                f"The companion {name!r} cannot be called with its variables and inputs of shapes "
                f"{shapes!r:.200}: {told}"
            ) from error

    return call
