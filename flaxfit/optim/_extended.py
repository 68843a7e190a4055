"""The optimizer of a task: the user's with clipping, freezing, averaging and loss scaling."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from flaxfit.optim._arguments import of_selected, with_arguments
from flaxfit.optim._averaged import like, schedule_free_states, wide
from flaxfit.optim._freeze import carry_over, check_patterns, mask, merge
from flaxfit.optim._generations import Generations, generations_after, update_each
from flaxfit.optim._hyperparams import with_hyperparams_of
from flaxfit.optim._spikes import Recent, no_recent
from flaxfit.tree import ArrayLike, OptState, Params, PyTree


class ExtendedState(NamedTuple):
    """The state of an optimizer and of its options; `()` for options that are not used."""

    inner: OptState
    """The state of the user's optimizer."""
    average: Params = ()
    """The exponential moving average of the trained parameters."""
    scale: PyTree = ()
    """Flax's `DynamicScale` of the loss, for float16."""
    recent: Recent | tuple[()] = ()
    """The loss and the norm of the gradient in recent steps, for `skip_above`."""
    n_steps: ArrayLike | tuple[()] = ()
    """The number of steps, for `ema_overwrite_frequency`."""
    statistics: PyTree = ()
    """The moving average of batch statistics, `{"model_state": {"batch_stats": ...}}`."""


@dataclasses.dataclass(frozen=True)
class ExtendedOptimizer:
    """Wraps an Optax transformation, which does not see the frozen parameters."""

    user: optax.GradientTransformation
    """The optimizer that was passed."""
    clip_norm: float | None = None
    freeze: tuple[str, ...] = ()
    ema: float | None = None
    ema_overwrite_frequency: int | None = None
    scales_loss: bool = False
    keeps_recent: bool = False
    generations: Generations = ()
    """The generations; without other options the state is the inner one."""

    @property
    def _is_bare(self) -> bool:
        return self == ExtendedOptimizer(self.user, generations=self.generations)

    @property
    def _inner(self) -> optax.GradientTransformationExtraArgs:
        user = with_arguments(self.user)
        if self.clip_norm is None:
            return user
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), user)

    def init(self, params: Params) -> OptState:
        """Returns the state before the first step, after checks of `freeze` and `ema`."""
        check_patterns(self.freeze, params)
        trained = mask(params, self.freeze)
        inner = self._inner.init(trained)
        if self._is_bare:
            return inner
        if self.ema is not None and schedule_free_states(inner):
            raise ValueError(
                f"Cannot keep a moving average, ema={self.ema}, with a schedule-free optimizer: it "
                "averages the parameters itself. Leave ema out; flaxfit.optim.averaged(state) and "
                "EvalLoop(task, ema=True) use its average, and a Model does so by itself."
            )
        average = () if self.ema is None else jax.tree.map(wide, trained)
        scale = _new_scale() if self.scales_loss else ()
        recent = no_recent() if self.keeps_recent else ()
        n_steps = () if self.ema_overwrite_frequency is None else jnp.int32(0)
        return ExtendedState(inner, average, scale, recent, n_steps)

    def update(
        self,
        updates: PyTree,
        state: PyTree,
        params: Params = None,
        *,
        model_state: PyTree = None,
        **extra: PyTree,
    ) -> tuple[PyTree, OptState]:
        """Takes one step; frozen parameters may be masked, else their updates are zero.

        Pass the new `model_state` if the optimizer also averages batch statistics.
        """
        if self._is_bare:
            return update_each(
                self._inner.update, self.generations, updates, state, params, **extra
            )

        def select(tree: PyTree) -> PyTree:
            return mask(tree, self.freeze)

        trained, extra = select(params), of_selected(extra, params, select)
        grads, update = select(updates), self._inner.update
        own, inner = update_each(update, self.generations, grads, state.inner, trained, **extra)
        average, n_steps = state.average, state.n_steps
        if self.ema is not None:
            # In bfloat16, (1 - ema) times the difference would round away.
            moved = like(optax.apply_updates(trained, own), average)
            average = optax.incremental_update(moved, average, 1 - self.ema)
            if model_state is not None:
                new = {"model_state": {"batch_stats": model_state["batch_stats"]}}
                move = functools.partial(_moved, step_size=1 - self.ema)
                state = state._replace(statistics=jax.tree.map(move, new, state.statistics))
        if self.ema_overwrite_frequency is not None:
            n_steps = n_steps + 1
            is_due = n_steps % self.ema_overwrite_frequency == 0
            own = jax.tree.map(
                lambda own, new, old: jnp.where(is_due, new - old, own), own, average, trained
            )
        # Frozen parameters that were passed get updates of zero.
        zeros = jax.tree.map(jnp.zeros_like, params)
        return merge(own, zeros), state._replace(inner=inner, average=average, n_steps=n_steps)


def _moved(new: jax.Array, old: jax.Array, step_size: float) -> Any:
    """Moves an average toward a new value; integers (counters) take the new value."""
    is_averaged = jnp.issubdtype(old.dtype, jnp.inexact)
    return optax.incremental_update(new.astype(old.dtype), old, step_size) if is_averaged else new


def with_statistics(optimizer: Any, opt_state: PyTree, model_state: PyTree) -> OptState:
    """Adds batch statistics to a moving average that lacks them."""
    has_average = getattr(optimizer, "ema", None) is not None
    found = model_state.get("batch_stats") if has_average else None
    if not found or opt_state.statistics:
        return opt_state
    return opt_state._replace(
        statistics={"model_state": {"batch_stats": jax.tree.map(wide, found)}}
    )


def first_state(optimizer: Any, params: Params, model_state: PyTree) -> OptState:
    """Returns the state before the first step, with the initial averages of all options."""
    return with_statistics(optimizer, optimizer.init(params), model_state)


def extend(optimizer: Any, **options: Any) -> Any:
    """Replaces the options around an optimizer; without options returns the optimizer itself."""
    user = getattr(optimizer, "user", optimizer)
    return ExtendedOptimizer(user, **options) if any(options.values()) else user


def generations_of(optimizer: Any) -> Generations:
    """Returns the generations of a task's optimizer."""
    return optimizer.generations if isinstance(optimizer, ExtendedOptimizer) else ()


def with_generations(optimizer: Any, generations: Generations) -> Any:
    """Returns a task's optimizer with other generations."""
    if isinstance(optimizer, ExtendedOptimizer):
        optimizer = dataclasses.replace(optimizer, generations=generations)
        return optimizer if generations or not optimizer._is_bare else optimizer.user
    return ExtendedOptimizer(optimizer, generations=generations) if generations else optimizer


def _new_scale() -> PyTree:
    from flax.training.dynamic_scale import DynamicScale

    # Arrays of fixed dtypes, not Python numbers: the types of a state must not change.
    return DynamicScale().replace(fin_steps=jnp.int32(0), scale=jnp.float32(65536.0))


def continued_state(
    old: OptState,
    optimizer: optax.GradientTransformation,
    params: Params,
    model_state: PyTree,
    *,
    is_same: bool,
) -> tuple[OptState, bool, Generations]:
    """Initializes an optimizer and copies the parts of `old` that match its state.

    Also returns whether the state of the user's optimizer, without the task's options, was copied,
    and the generations. The same optimizer keeps its state and hyperparameters; only parameters
    that were frozen start from scratch. Another optimizer has its own hyperparameters.
    """
    new = first_state(optimizer, params, model_state)
    fields = new._asdict() if isinstance(new, ExtendedState) else {"inner": new}
    before = old if isinstance(old, ExtendedState) else ExtendedState(old)
    is_kept = is_same
    for name, own in fields.items():
        parts = [getattr(before, name)]
        if name == "inner":
            parts += _clipped_or_not(before.inner)
        if alike := [part for part in parts if _are_alike(part, own)]:
            fields[name] = alike[0] if is_same else with_hyperparams_of(alike[0], own)
            is_kept |= name == "inner"
        elif is_same:
            fields[name] = functools.reduce(
                lambda new, part: carry_over(part, new), parts[::-1], own
            )
    state = new._replace(**fields) if isinstance(new, ExtendedState) else fields["inner"]
    return state, is_kept, generations_after(generations_of(optimizer), old, state, params)


def _clipped_or_not(inner: OptState) -> list[OptState]:
    """Returns the state with `clip_norm` added and, if it seems to have one, removed."""
    is_clipped = type(inner) is tuple and len(inner) == 2 and inner[0] == optax.EmptyState()
    return [(optax.EmptyState(), inner), *([inner[1]] if is_clipped else [])]


def _are_alike(some: PyTree, others: PyTree) -> bool:
    """Returns whether two trees have the same structure, shapes and dtypes."""
    shapes = [
        [(jnp.shape(x), getattr(x, "dtype", None)) for x in jax.tree.leaves(tree)]
        for tree in (some, others)
    ]
    return jax.tree.structure(some) == jax.tree.structure(others) and shapes[0] == shapes[1]


def wrap_state(
    opt_state: OptState, optimizer: object, params: Params, model_state: PyTree
) -> OptState:
    """Wraps the state of a user's optimizer for one with options; returns others unchanged."""
    if isinstance(opt_state, ExtendedState):
        return with_statistics(optimizer, opt_state, model_state)
    if not isinstance(optimizer, ExtendedOptimizer) or optimizer._is_bare:
        return opt_state
    own = jax.eval_shape(optimizer.user.init, params)
    if jax.tree.structure(own) != jax.tree.structure(opt_state):
        return opt_state
    inner = opt_state if optimizer.clip_norm is None else (optax.EmptyState(), opt_state)
    return carry_over(ExtendedState(inner), first_state(optimizer, params, model_state))
