"""The constant learning rate of a plain Optax optimizer, such as `optax.adam(1e-3)`."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxfit.optim._definition import OptimizerDef
from flaxfit.optim._extended import ExtendedOptimizer, ExtendedState
from flaxfit.optim._hyperparams import is_injected
from flaxfit.optim._overridable import as_float
from flaxfit.tree import ArrayLike, OptState, Params, PyTree


def plain_rate(optimizer: Any) -> float | None:
    """Returns the constant learning rate of an optimizer that ends in a scaling by it, or None.

    >>> plain_rate(optax.adam(0.25)), plain_rate(optax.adam(optax.constant_schedule(0.25)))
    (0.25, None)
    """
    factor = _last_factor(getattr(getattr(optimizer, "user", optimizer), "update", None))
    # A factor of -1 may only flip the sign, with the rate elsewhere in the chain.
    return None if factor is None or factor >= 0 or factor == -1 else -factor


@functools.lru_cache(maxsize=64)
def _last_factor(update: object) -> float | None:
    """Returns the factor of the last `optax.scale`: 1 for identity, None for other updates."""
    if not inspect.isfunction(update) or not update.__module__.startswith("optax."):
        return None
    # Optax has no public way to ask: read the closure variables of its update functions.
    held = inspect.getclosurevars(update).nonlocals
    match update.__qualname__.partition(".")[0]:
        case "identity":
            return 1.0
        case "scale":
            return float(held["step_size"]) if _is_number(held["step_size"]) else None
        case "with_extra_args_support":
            return _last_factor(held["tx"].update)
        case "chain":
            factors = map(_last_factor, reversed(held["update_fns"]))
            return next((factor for factor in factors if factor != 1), 1.0)
    return None


class LiveRate(OptimizerDef):
    """A plain optimizer with its learning rate in the state.

    >>> optimizer = LiveRate(optax.sgd(0.5))
    >>> state = optimizer.init(jnp.ones(2))
    >>> optimizer.update(jnp.ones(2), state, learning_rate=0.1)[0]
    Array([-0.1, -0.1], dtype=float32)
    """

    def __init__(self, user: optax.GradientTransformation):
        made = plain_rate(user)
        if made is None:
            raise ValueError("Cannot determine the learning rate of this optimizer.")
        inner = optax.with_extra_args_support(user)

        def of_rate(learning_rate: ArrayLike) -> optax.GradientTransformation:
            def update(
                updates: PyTree, state: OptState, params: Params = None, **extra: Any
            ) -> tuple[PyTree, OptState]:
                updates, state = inner.update(updates, state, params, **extra)
                old, new = as_float(made), as_float(learning_rate)
                ratio = jnp.where(new == old, 1, new / old)  # XLA multiplies by a rounded 1 / old.
                scaled = jax.tree.map(lambda x: (ratio * x).astype(jnp.result_type(x)), updates)
                return scaled, state

            return optax.GradientTransformationExtraArgs(user.init, update)

        super().__init__(of_rate, learning_rate=made)
        self.rate = made

    def __repr__(self) -> str:
        return f"LiveRate({self.rate:g})"

    def adopt(self, opt_state: OptState, *, is_clipped: bool = False) -> OptState:
        """Adds the rate to the state that a task keeps for the plain optimizer."""

        def wrapped(inner: OptState) -> OptState:
            rate = {"learning_rate": as_float(self.rate)}
            return optax.InjectStatefulHyperparamsState((), rate, {}, inner)  # pyright: ignore

        if not isinstance(opt_state, ExtendedState):
            return wrapped(opt_state)
        inner: Any = opt_state.inner
        return opt_state._replace(
            inner=(inner[0], wrapped(inner[1])) if is_clipped else wrapped(inner)
        )


def live_rate(optimizer: Any) -> Any:
    """Returns the optimizer with its constant rate in the state, or None if unknown."""
    if not isinstance(optimizer, ExtendedOptimizer):
        return None if plain_rate(optimizer) is None else LiveRate(optimizer)
    live = live_rate(optimizer.user)
    return None if live is None else dataclasses.replace(optimizer, user=live)


def matched(optimizer: Any, opt_state: OptState) -> tuple[Any, OptState]:
    """Returns the optimizer and the state, both with a live rate if one of them has it.

    >>> plain = optax.sgd(0.1)
    >>> matched(plain, LiveRate(plain).init(jnp.ones(2)))[0]
    LiveRate(0.1)
    """
    user = getattr(optimizer, "user", optimizer)
    if isinstance(user, LiveRate):
        is_clipped = getattr(optimizer, "clip_norm", None) is not None
        is_same = has_live_rate(opt_state)
        return optimizer, opt_state if is_same else user.adopt(opt_state, is_clipped=is_clipped)
    live = live_rate(optimizer) if has_live_rate(opt_state) else None
    return (optimizer if live is None else live), opt_state


def has_live_rate(opt_state: OptState) -> bool:
    """Returns whether a state looks like a `LiveRate`'s, possibly within a task's options."""
    own: Any = opt_state.inner if isinstance(opt_state, ExtendedState) else opt_state
    nodes = [own, *own] if type(own) is tuple else [own]
    return any(is_injected(node) and {*node.hyperparams} == {"learning_rate"} for node in nodes)


def _is_number(value: object) -> bool:
    is_number = isinstance(value, int | float | np.ndarray | np.generic | jax.Array)
    return is_number and not isinstance(value, bool) and jnp.ndim(value) == 0
