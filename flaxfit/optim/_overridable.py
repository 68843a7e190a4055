"""A hyperparameter as optax's stateful schedules are: it can be set, and overridden for a step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from flaxfit.optim._hyperparams import OverrideState


class Overridable(optax.schedules.StatefulSchedule):
    """A constant or a schedule; a value in the state beats it, and one of the step beats both."""

    def __init__(self, name: str, value: Any):
        self.name = name
        is_ready = isinstance(value, optax.schedules.StatefulSchedule)
        make: Any = optax.WrappedSchedule if callable(value) else Constant
        self.schedule: Any = value if is_ready else make(value)

    def init(self) -> OverrideState:
        """The state at the beginning of the schedule."""
        state = self.schedule.init()
        return OverrideState(state, _as_float(self.schedule(state)), jnp.zeros((), bool))

    def update(self, state: OverrideState, **extra_args: Any) -> OverrideState:
        """The state after a step: a schedule counts on, overridden or not."""
        return state._replace(schedule=self.schedule.update(state.schedule, **extra_args))

    def __call__(self, state: OverrideState, **extra_args: Any) -> jax.Array:
        """The value in a step."""
        if self.name in extra_args and extra_args[self.name] is not None:
            return _as_float(extra_args[self.name])
        scheduled = _as_float(self.schedule(state.schedule, **extra_args))
        if self.name in extra_args:
            return scheduled
        return jnp.where(state.is_set, state.value, scheduled)


class Constant(optax.schedules.StatefulSchedule):
    """A schedule that stays where it is, without a state."""

    def __init__(self, value: Any):
        self.value = value

    def init(self) -> tuple[()]:
        """No state."""
        return ()

    def update(self, state: tuple[()], **extra_args: Any) -> tuple[()]:
        """No state."""
        return state

    def __call__(self, state: tuple[()], **extra_args: Any) -> Any:
        """The value."""
        return self.value


def _as_float(value: Any) -> jax.Array:
    # Never the dtype of the parameters: a learning rate in bfloat16 has three digits.
    return jnp.asarray(value, jnp.result_type(float))
