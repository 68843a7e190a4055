"""Optimizers that are written for one parameter at a time, as optax transformations."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from flaxfit.tree._types import ArrayLike, Params, PyTree


class OptimizerState(NamedTuple):
    """The state of an optimizer that is written for one parameter at a time."""

    step: ArrayLike
    param_states: PyTree
    """In each parameter's place, its state."""


def per_parameter(
    init_param_state: Callable[[ArrayLike], PyTree],
    apply_param_gradient: Callable[..., tuple[ArrayLike, PyTree]],
) -> optax.GradientTransformation:
    """The transformation of a whole tree from the functions of one parameter.

    >>> halve = per_parameter(lambda param: (), lambda step, param, state, grad: (param / 2, state))
    >>> updates, _ = halve.update({"w": 0.0}, halve.init({"w": 3.0}), {"w": 3.0})
    >>> updates
    {'w': -1.5}

    Args:
      init_param_state: `(param) -> state`.
      apply_param_gradient: `(step, param, state, grad) -> (param, state)`.
    """

    def init(params: Params) -> OptimizerState:
        return OptimizerState(jnp.zeros((), jnp.int32), jax.tree.map(init_param_state, params))

    def update(
        updates: PyTree, state: PyTree, params: Params = None
    ) -> tuple[PyTree, OptimizerState]:
        if params is None:
            raise ValueError("Pass the parameters: optimizer.update(grads, state, params).")
        leaves, structure = jax.tree.flatten(params)
        of_each = [structure.flatten_up_to(tree) for tree in (state.param_states, updates)]
        moved = [
            apply_param_gradient(state.step, *of_one)
            for of_one in zip(leaves, *of_each, strict=True)
        ]
        changes = [new - old for old, (new, _) in zip(leaves, moved, strict=True)]
        states = [new for _, new in moved]
        return structure.unflatten(changes), OptimizerState(
            state.step + 1, structure.unflatten(states)
        )

    return optax.GradientTransformation(init, update)
