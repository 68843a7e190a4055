"""Computes the average of schedule-free optimizers, however deeply their states are nested."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from flaxfit.tree._paths import flat
from flaxfit.tree._types import ArrayLike, OptState, Params, PyTree

# A state that is restored without a target lacks what holds no arrays.
_FIELDS = {*optax.contrib.ScheduleFreeState._fields} - {"base_optimizer_state"}


def nodes(opt_state: OptState) -> list[PyTree]:
    """The states of schedule-free optimizers; restored without a target, they are mappings."""
    return [node for node in jax.tree.leaves(opt_state, is_leaf=_is_one) if _is_one(node)]


def average(opt_state: OptState, params: Params) -> dict[str, ArrayLike]:
    """The average of the parameters that these optimizers train, by path.

    Raises:
      ValueError: they train reshaped or renamed parameters.
    """
    params, found = flat(params), {}
    for node in nodes(opt_state):
        fields = node if isinstance(node, Mapping) else node._asdict()
        z = flat(fields["z"])
        if strange := [path for path in z if path not in params]:
            raise ValueError(
                "Cannot compute the average of a schedule-free optimizer whose arrays are not the "
                f"parameters: {', '.join(strange[:5])}. Leave out what reshapes or renames them, "
                "such as optax.flatten."
            )
        found |= _average(fields["b1"], {path: params[path] for path in z}, z)
    return found


@jax.jit
def _average(b1: ArrayLike, params: Params, z: Params) -> Params:
    state = optax.contrib.ScheduleFreeState(b1, None, None, None, None, z)  # pyright: ignore
    found = optax.contrib.schedule_free_eval_params(state, params)  # pyright: ignore
    # Before the first step they are the same, to the bit.
    return jax.tree.map(lambda x, y, z: jnp.where(y == z, y, x.astype(y.dtype)), found, params, z)


def _is_one(node: PyTree) -> bool:
    is_plain = isinstance(node, Mapping) and {*node} >= _FIELDS
    return is_plain or isinstance(node, optax.contrib.ScheduleFreeState)
