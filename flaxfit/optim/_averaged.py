"""averaged: a state with the averaged parameters in place of the trained ones."""

from flaxfit.optim import _schedule_free
from flaxfit.optim._extended import has_ema, swap_ema
from flaxfit.optim._freeze import carry_over
from flaxfit.tree._types import PyTree


def averaged(state: PyTree) -> PyTree:
    """A state whose parameters are the average that is evaluated in place of the trained ones.

    It is the moving average of `ema=`, or `optax.contrib.schedule_free_eval_params` of an optimizer
    of that family, which may be within chains, groups and wrappers.

    >>> import jax.numpy as jnp, optax
    >>> from flaxfit import TrainState
    >>> optimizer = optax.chain(optax.contrib.schedule_free_sgd(0.1, b1=0.5))
    >>> state = TrainState.create(optimizer, {"params": {"w": jnp.ones(1)}})
    >>> averaged(state.replace(params={"w": jnp.full(1, 1.5)})).params
    {'w': Array([2.], dtype=float32)}

    Args:
      state: a `TrainState`; it stays as it is.

    Raises:
      ValueError: its optimizer keeps no average, or averages arrays that are not parameters.
    """
    if has_ema(state) or not has_average(state):
        return swap_ema(state)
    average = _schedule_free.average(state.opt_state, state.params)
    return state.replace(params=carry_over(average, state.params))


def has_average(state: PyTree) -> bool:
    """Whether the optimizer of a state keeps an average of the parameters."""
    return hasattr(state, "opt_state") and (
        has_ema(state) or bool(_schedule_free.nodes(state.opt_state))
    )
