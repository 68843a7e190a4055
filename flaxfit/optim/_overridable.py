"""A schedule whose value can be overridden, in the state or for one step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from flaxfit.tree import ArrayLike, Function, PyTree


class OverrideState(NamedTuple):
    """The state of a scheduled hyperparameter."""

    schedule: PyTree
    """The state of the schedule, which also advances under an override."""
    value: ArrayLike
    """The override."""
    is_set: ArrayLike
    """Whether the override applies."""


class Overridable(optax.schedules.StatefulSchedule):
    """A schedule that a value in the state overrides; an argument of the step overrides both."""

    def __init__(self, name: str, schedule: optax.schedules.StatefulSchedule | Function):
        self.name = name
        is_stateful = isinstance(schedule, optax.schedules.StatefulSchedule)
        self.schedule = schedule if is_stateful else optax.WrappedSchedule(schedule)

    def init(self) -> OverrideState:
        """Returns the state before the first step, without an override."""
        state = self.schedule.init()
        return OverrideState(state, as_float(self.schedule(state)), jnp.zeros((), bool))

    def update(self, state: OverrideState, **extra_args: ArrayLike) -> OverrideState:
        """Advances the schedule, overridden or not."""
        return state._replace(schedule=self.schedule.update(state.schedule, **extra_args))

    def __call__(self, state: OverrideState, **extra_args: ArrayLike) -> jax.Array:
        """Returns the value for a step."""
        if self.name in extra_args:
            return as_float(extra_args[self.name])
        return jnp.where(state.is_set, state.value, self.scheduled(state, **extra_args))

    def scheduled(self, state: OverrideState, **extra_args: ArrayLike) -> jax.Array:
        """Returns the value of the schedule itself."""
        return as_float(self.schedule(state.schedule, **extra_args))


def as_float(value: ArrayLike) -> jax.Array:
    """Returns a hyperparameter as an array of the default float type."""
    # Never the dtype of the parameters: bfloat16 has less than three decimal digits.
    return jnp.asarray(value, jnp.result_type(float))
