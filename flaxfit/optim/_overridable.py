"""A schedule that can be overridden, in the state for good or in one step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from flaxfit.optim._hyperparams import OverrideState
from flaxfit.tree._types import ArrayLike


class Overridable(optax.schedules.StatefulSchedule):
    """A schedule; a value that is set in the state beats it, and one of the step beats both."""

    def __init__(self, name: str, schedule: Any):
        self.name = name
        is_stateful = isinstance(schedule, optax.schedules.StatefulSchedule)
        self.schedule: Any = schedule if is_stateful else optax.WrappedSchedule(schedule)

    def init(self) -> OverrideState:
        """The state at the beginning of the schedule."""
        state = self.schedule.init()
        return OverrideState(state, as_float(self.schedule(state)), jnp.zeros((), bool))

    def update(self, state: OverrideState, **extra_args: ArrayLike) -> OverrideState:
        """The state after a step: the schedule counts on, overridden or not."""
        return state._replace(schedule=self.schedule.update(state.schedule, **extra_args))

    def __call__(self, state: OverrideState, **extra_args: ArrayLike) -> jax.Array:
        """The value in a step."""
        if self.name in extra_args:
            return as_float(extra_args[self.name])
        return jnp.where(state.is_set, state.value, self.scheduled(state, **extra_args))

    def scheduled(self, state: OverrideState, **extra_args: ArrayLike) -> jax.Array:
        """The value in a step if nothing overrides it."""
        return as_float(self.schedule(state.schedule, **extra_args))


def as_float(value: ArrayLike) -> jax.Array:
    """The value of a hyperparameter as an array."""
    # Never in the dtype of the parameters: a learning rate in bfloat16 has three digits.
    return jnp.asarray(value, jnp.result_type(float))
