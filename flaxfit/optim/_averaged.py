"""Averages of parameters: the moving average of `ema=`, and that of schedule-free optimizers."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxfit.optim._freeze import carry_over
from flaxfit.tree import ArrayLike, OptState, Params, PyTree, flat

# A state that is restored without a target lacks fields without arrays.
_FIELDS = {*optax.contrib.ScheduleFreeState._fields} - {"base_optimizer_state"}


def averaged(state: PyTree) -> PyTree:
    """Replaces the trained parameters by their average, for evaluation.

    The average is the moving average of `ema=`, also for the collection "batch_stats", or
    `optax.contrib.schedule_free_eval_params` of a schedule-free optimizer, which may be nested in
    chains, groups and wrappers.

    >>> import jax.numpy as jnp, optax
    >>> from flaxfit import TrainState
    >>> optimizer = optax.chain(optax.contrib.schedule_free_sgd(0.1, b1=0.5))
    >>> state = TrainState.create(optimizer, {"params": {"w": jnp.ones(1)}})
    >>> averaged(state.replace(params={"w": jnp.full(1, 1.5)})).params
    {'w': Array([2.], dtype=float32)}

    Args:
      state: a `TrainState`; it is not changed.

    Raises:
      ValueError: its optimizer keeps no average, or averages arrays that are not parameters.
    """
    if has_ema(state) or not has_average(state):
        return swap_ema(state)
    average = _schedule_free_average(state.opt_state, state.params)
    return state.replace(params=carry_over(average, state.params))


def eval_params(state: PyTree) -> Params:
    """Returns the parameters to evaluate: averaged if the state keeps an average; see `averaged`.

    >>> from flaxfit import TrainState
    >>> eval_params(TrainState.create(optax.sgd(0.1), {"params": {"w": 1.0}}))
    {'w': 1.0}
    """
    return averaged(state).params if has_average(state) else state.params


def swap_ema(state: PyTree) -> PyTree:
    """Exchanges parameters and batch statistics of a state with their moving averages.

    Swapping again restores the state, up to the rounding of parameters in 16 bits. Frozen
    parameters have no average and stay.

    >>> from flaxfit import TrainState
    >>> from flaxfit.optim._extended import ExtendedState
    >>> state = TrainState(0, {"w": 1.0}, ExtendedState((), {"w": 0.5}), {}, None)
    >>> swap_ema(state).params
    {'w': 0.5}

    Raises:
      ValueError: the state holds no average.
    """
    kept = state.opt_state
    if not jax.tree.leaves(_field(kept, "average")):
        if schedule_free_states(kept):
            raise ValueError(
                "A schedule-free optimizer keeps no average to swap, but computes it: use "
                "flaxfit.optim.averaged(state)."
            )
        raise ValueError(
            "This state holds no moving average of its parameters: train with "
            "TrainTask(..., ema=0.999) or Model(..., ema=0.999)."
        )
    # By path: a state that was restored without a target holds plain containers.
    statistics = _field(kept, "statistics")
    average = {"params": _field(kept, "average"), **(statistics or {})}
    own = {"params": state.params, "model_state": state.model_state}
    swapped = like(carry_over(own, average), average)
    changed = {"average": swapped.pop("params"), "statistics": swapped or ()}
    changed = {**kept, **changed} if isinstance(kept, dict) else kept._replace(**changed)
    return state.replace(**like(carry_over(average, own), own), opt_state=changed)


def with_average_of(state: PyTree, earlier: Mapping[str, PyTree]) -> PyTree | None:
    """Returns a state with earlier "params" and the average kept in the earlier "opt_state".

    Returns None if a schedule-free optimizer trains other parameters now.
    """
    params, opt_state = earlier["params"], earlier["opt_state"]
    state = state.replace(params=params)
    if has_ema(state):
        # A parameter that was frozen then is its own average.
        own = _field(state.opt_state, "average")
        average = like(carry_over(_field(opt_state, "average"), carry_over(params, own)), own)
        statistics = _field(state.opt_state, "statistics")
        statistics = carry_over(_field(opt_state, "statistics"), statistics)
        changed = state.opt_state._replace(average=average, statistics=statistics)
        return state.replace(opt_state=changed)
    if flat(opt_state).keys() != flat(state.opt_state).keys():
        return None
    return state.replace(opt_state=carry_over(opt_state, state.opt_state))


def wide(x: ArrayLike) -> jax.Array:
    """Copies to float32 or wider; a copy since a donated state must not hold a buffer twice."""
    x = jnp.copy(x)
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if is_narrow else x


def like(new: PyTree, old: PyTree) -> PyTree:
    """Casts the leaves of `new` to the dtypes of `old`."""
    return jax.tree.map(lambda a, b: a if _dtype(a) == _dtype(b) else a.astype(b.dtype), new, old)


def _dtype(x: ArrayLike) -> np.dtype:
    return x.dtype if hasattr(x, "dtype") else np.dtype(type(x))


def has_ema(state: PyTree) -> bool:
    """Returns whether a state holds a moving average of its parameters."""
    return bool(jax.tree.leaves(_field(state.opt_state, "average")))


def has_average(state: PyTree) -> bool:
    """Returns whether the optimizer of a state keeps an average of the parameters."""
    return hasattr(state, "opt_state") and (
        has_ema(state) or bool(schedule_free_states(state.opt_state))
    )


def schedule_free_states(opt_state: OptState) -> list[PyTree]:
    """Finds the states of schedule-free optimizers; restored without a target, they are dicts."""
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_schedule_free)
    return [node for node in nodes if _is_schedule_free(node)]


def _field(opt_state: OptState, name: str) -> PyTree:
    is_plain = isinstance(opt_state, dict)
    return opt_state.get(name, ()) if is_plain else getattr(opt_state, name, ())


def _is_schedule_free(node: PyTree) -> bool:
    is_plain = isinstance(node, Mapping) and {*node} >= _FIELDS
    return is_plain or isinstance(node, optax.contrib.ScheduleFreeState)


def _schedule_free_average(opt_state: OptState, params: Params) -> dict[str, ArrayLike]:
    """Returns the average of the parameters that schedule-free optimizers train, by path."""
    params, found = flat(params), {}
    for node in schedule_free_states(opt_state):
        fields = node if isinstance(node, Mapping) else node._asdict()
        z = flat(fields["z"])
        if strange := [path for path in z if path not in params]:
            raise ValueError(
                "Cannot compute the average of a schedule-free optimizer whose arrays are not the "
                f"parameters: {', '.join(strange[:5])}. Remove transformations that reshape or "
                "rename them, such as optax.flatten."
            )
        found |= _eval_params(fields["b1"], {path: params[path] for path in z}, z)
    return found


@jax.jit
def _eval_params(b1: ArrayLike, params: Params, z: Params) -> Params:
    state = optax.contrib.ScheduleFreeState(b1, None, None, None, None, z)  # pyright: ignore
    found = optax.contrib.schedule_free_eval_params(state, params)  # pyright: ignore
    # Before the first step they are equal; Optax's formula would round.
    return jax.tree.map(lambda x, y, z: jnp.where(y == z, y, x.astype(y.dtype)), found, params, z)
