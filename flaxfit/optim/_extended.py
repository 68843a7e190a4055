"""The optimizer of a task: the user's, with clipping, freezing, averaging and scaling around it."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from flaxfit.optim import _schedule_free
from flaxfit.optim._freeze import carry_over, check_patterns, mask, merge
from flaxfit.tree._types import OptState, Params, PyTree


class ExtendedState(NamedTuple):
    """The state of an optimizer, and what is kept beside it; `()` where that is not asked for."""

    inner: OptState
    """The state of the user's optimizer."""
    average: Params = ()
    """The exponential moving average of the trained parameters."""
    scale: PyTree = ()
    """flax's `DynamicScale` of the loss, for float16."""


@dataclasses.dataclass(frozen=True)
class ExtendedOptimizer:
    """An optax transformation around another one. It does not see the parameters it freezes."""

    user: Any
    """The optimizer that was passed."""
    clip_norm: float | None = None
    freeze: tuple[str, ...] = ()
    ema: float | None = None
    scales_loss: bool = False

    @property
    def _inner(self) -> Any:
        if self.clip_norm is None:
            return optax.with_extra_args_support(self.user)
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), self.user)

    def init(self, params: Params) -> ExtendedState:
        """The state before the first step.

        Raises:
          ValueError: a pattern to freeze matches nothing, or they match everything; or a moving
            average is asked for beside that of a schedule-free optimizer.
        """
        check_patterns(self.freeze, params)
        trained = mask(params, self.freeze)
        inner = self._inner.init(trained)
        if self.ema is not None and _schedule_free.nodes(inner):
            raise ValueError(
                f"Cannot keep a moving average, ema={self.ema}, with a schedule-free optimizer: it "
                "averages the parameters itself. Leave ema out; flaxfit.optim.averaged(state) and "
                "EvalLoop(task, ema=True) use its average, and a Model does so by itself."
            )
        # A copy: a state that is donated must not hold one buffer twice.
        average = () if self.ema is None else jax.tree.map(jnp.array, trained)
        return ExtendedState(inner, average, new_scale(self.scales_loss))

    def update(
        self, updates: PyTree, state: PyTree, params: Params = None, **extra: object
    ) -> tuple[PyTree, ExtendedState]:
        """One step; frozen parameters may be left out of the trees, and are given zeros if not."""
        trained = mask(params, self.freeze)
        own, inner = self._inner.update(mask(updates, self.freeze), state.inner, trained, **extra)
        average = state.average
        if self.ema is not None:
            moved = optax.apply_updates(trained, own)
            average = optax.incremental_update(moved, average, 1 - self.ema)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return merge(own, zeros), state._replace(inner=inner, average=average)


def extend(optimizer: Any, **options: Any) -> Any:
    """Wraps an optimizer in these options; returns it unchanged if there are none.

    Replaces earlier options, so that extending again changes nothing.
    """
    user = getattr(optimizer, "user", optimizer)
    return ExtendedOptimizer(user, **options) if any(options.values()) else user


def new_scale(is_wanted: bool) -> PyTree:
    """A fresh `DynamicScale`, or `()`."""
    if not is_wanted:
        return ()
    from flax.training.dynamic_scale import DynamicScale

    # Arrays of fixed dtypes, not Python numbers: the state's types must not change on the way.
    return DynamicScale().replace(fin_steps=jnp.int32(0), scale=jnp.float32(65536.0))


def carry_state(old: PyTree, optimizer: Any, params: Params) -> OptState:
    """The state of an optimizer that freezes other parameters than the one that made `old`.

    Keeps the state in `old` of every parameter that it has; others start fresh.
    """
    new = optimizer.init(params)
    if isinstance(new, ExtendedState):
        return carry_over(old if isinstance(old, ExtendedState) else ExtendedState(old), new)
    return carry_over(old.inner if isinstance(old, ExtendedState) else old, new)


def wrap_state(opt_state: OptState, optimizer: Any, params: Params) -> OptState:
    """The state of a user's own optimizer as that of the optimizer with the options around it.

    Returns any other state unchanged.
    """
    if isinstance(opt_state, ExtendedState) or not isinstance(optimizer, ExtendedOptimizer):
        return opt_state
    own = jax.eval_shape(optimizer.user.init, params)
    if jax.tree.structure(own) != jax.tree.structure(opt_state):
        return opt_state
    inner = opt_state if optimizer.clip_norm is None else (optax.EmptyState(), opt_state)
    return carry_over(ExtendedState(inner), optimizer.init(params))


def swap_ema(state: PyTree) -> PyTree:
    """A state whose parameters are the moving average, and the average the parameters.

    Swapping again restores the state. Frozen parameters have no average and stay.

    >>> from flaxfit import TrainState
    >>> state = TrainState(0, {"w": 1.0}, ExtendedState((), {"w": 0.5}), {}, None)
    >>> swap_ema(state).params
    {'w': 0.5}

    Raises:
      ValueError: the state holds no average.
    """
    kept = state.opt_state
    average = _average(kept)
    if not jax.tree.leaves(average):
        if _schedule_free.nodes(kept):
            raise ValueError(
                "A schedule-free optimizer keeps no average to swap, but computes it: use "
                "flaxfit.optim.averaged(state)."
            )
        raise ValueError(
            "This state holds no moving average of its parameters: train with "
            "TrainTask(..., ema=0.999) or Model(..., ema=0.999)."
        )
    # By path, as a state that was restored without a target holds plain containers.
    swapped = carry_over(state.params, average)
    is_plain = isinstance(kept, dict)
    changed = {**kept, "average": swapped} if is_plain else kept._replace(average=swapped)
    return state.replace(params=carry_over(average, state.params), opt_state=changed)


def has_ema(state: PyTree) -> bool:
    """Whether a state holds a moving average of its parameters."""
    return bool(jax.tree.leaves(_average(state.opt_state)))


def _average(opt_state: OptState) -> Params:
    is_plain = isinstance(opt_state, dict)
    return opt_state.get("average", ()) if is_plain else getattr(opt_state, "average", ())
