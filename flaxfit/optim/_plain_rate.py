"""The learning rate of a plain Optax optimizer, such as `optax.adam(1e-3)`: read and set."""

import dataclasses
import functools
import threading
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxfit.optim._demands import parts_of
from flaxfit.optim._extended import ExtendedOptimizer, ExtendedState
from flaxfit.optim._hyperparams import check_number, is_injected
from flaxfit.optim._optimizer import Adjustable
from flaxfit.optim._overridable import as_float
from flaxfit.tree._types import ArrayLike, Function, OptState, Params, PyTree

_SCALE = "scale.<locals>.update_fn"
_SCHEDULE = "scale_by_schedule.<locals>.update_fn"
_CHAIN = "chain.<locals>.update_fn"
_LINEAR = ("scale_by_learning_rate", "scale_by_param_block_", "scale_by_polyak")
"""Transformations that scale updates by a factor that does not depend on their size."""
_OTHERS = ("scale_by_schedule.", "inject_hyperparams.")
_lock = threading.RLock()


class PlainRate(NamedTuple):
    """Where Optax has put the number that it was given as the learning rate."""

    value: float
    cells: tuple[CellType, ...]
    """The cells of the functions that scale updates by the rate, with a sign."""


def plain_rate(optimizer: Any) -> PlainRate | None:
    """Finds the constant learning rate of an optimizer; None if that is not certain.

    Optax multiplies by the rate in `optax.scale`, whose factor a closure holds. It must be the
    only factor, apart from a change of sign, and no other part may know the rate, or normalize
    what was multiplied by it.

    >>> plain_rate(optax.adam(0.25)).value, plain_rate(optax.adafactor(0.25)).value
    (0.25, 0.25)
    """
    return _found_rate(getattr(optimizer, "user", optimizer))


@functools.lru_cache(maxsize=16)
def _found_rate(optimizer: Any) -> PlainRate | None:
    parts = parts_of(optimizer)
    if any(isinstance(part, Adjustable) for part in parts):
        return None  # The states of these hold what can be set.
    functions = list(_functions(parts))
    cells = [held["step_size"] for f, held in functions if f.__qualname__ == _SCALE]
    factors = [cell.cell_contents for cell in cells]
    if not all(map(_is_number, factors)) or any(_knows_rate(*each) for each in functions):
        return None
    # A factor of -1 only flips the sign, and looks the same as such a rate.
    rates = {float(factor) for factor in factors} - {-1.0}
    is_turned = -1.0 in factors
    if len(rates) != 1 or (rate := rates.pop()) == 0 or is_turned != (rate > 0):
        return None
    chosen = [cell for cell in cells if float(cell.cell_contents) == rate]
    if any(_undoes(held, chosen) for f, held in functions if f.__qualname__ == _CHAIN):
        return None
    return PlainRate(abs(rate), tuple(chosen))


def plain_schedule(optimizer: Any) -> Function | None:
    """Finds the schedule of the learning rate of an optimizer; None if there is not just one.

    >>> schedule = plain_schedule(optax.adam(optax.linear_schedule(1.0, 0.0, 10)))
    >>> round(float(schedule(1)), 6)
    0.9
    """
    return _found_schedule(getattr(optimizer, "user", optimizer))


@functools.lru_cache(maxsize=16)
def _found_schedule(optimizer: Any) -> Function | None:
    functions = list(_functions(parts_of(optimizer)))
    found = [held["step_size_fn"] for f, held in functions if f.__qualname__ == _SCHEDULE]
    if len(found) != 1 or any(f.__qualname__.startswith("fromage.") for f, _ in functions):
        return None  # The factor of `optax.fromage` is another one than the rate.
    factor = found[0].cell_contents
    return jax.jit(lambda count: jnp.abs(factor(count)))


def told_rate(optimizer: Any, opt_state: OptState) -> float | None:
    """Returns the rate of the latest step of a plain optimizer, or None if it is unknown.

    >>> optimizer = optax.sgd(0.1)
    >>> told_rate(optimizer, optimizer.init(jnp.ones(2)))
    0.1
    """
    if (constant := plain_rate(optimizer)) is not None:
        return constant.value
    if (schedule := plain_schedule(optimizer)) is None:
        return None
    states = [node for node in jax.tree.leaves(opt_state, is_leaf=_counts) if _counts(node)]
    return float(schedule(max(0, int(states[0].count) - 1))) if len(states) == 1 else None


class LiveRate(Adjustable):
    """A plain optimizer whose learning rate lies in its state, as in that of an `OptimizerDef`.

    >>> optimizer = LiveRate(optax.sgd(0.5))
    >>> state = optimizer.init(jnp.ones(2))
    >>> optimizer.update(jnp.ones(2), state, learning_rate=0.1)[0]
    Array([-0.1, -0.1], dtype=float32)
    """

    def __init__(self, user: optax.GradientTransformation):
        rate = plain_rate(user)
        if rate is None:
            raise ValueError("Cannot determine the learning rate of this optimizer.")
        self.plain, self.rate = user, rate
        self._inner = optax.with_extra_args_support(user)

    def __repr__(self) -> str:
        return f"LiveRate({self.rate.value:g})"

    @property
    def transformations(self) -> tuple[PyTree, ...]:
        """The optimizer itself."""
        return (self.plain,)

    @property
    def known(self) -> Iterable[str]:
        """The names of all hyperparameters."""
        return ("learning_rate",)

    def describe(self) -> str:
        """Lists the hyperparameters for messages."""
        return str(list(self.known))

    def update_hyper_params(self, *, hyper_params: PyTree = None, **overrides: ArrayLike) -> PyTree:
        """Returns the hyperparameters with some values replaced."""
        return {"learning_rate": self.rate.value, **(hyper_params or {}), **overrides}

    def wrapped(self, inner: OptState) -> OptState:
        """Returns the state of the plain optimizer with the rate that it was made with."""
        rate = {"learning_rate": as_float(self.rate.value)}
        return optax.InjectStatefulHyperparamsState((), rate, {}, inner)  # pyright: ignore

    def adopt(self, opt_state: OptState, *, is_clipped: bool = False) -> OptState:
        """Returns the state that a task keeps for the plain optimizer with the rate added."""
        if not isinstance(opt_state, ExtendedState):
            return self.wrapped(opt_state)
        inner: Any = opt_state.inner
        inner = (inner[0], self.wrapped(inner[1])) if is_clipped else self.wrapped(inner)
        return opt_state._replace(inner=inner)

    def _init(self, params: Params) -> OptState:
        return self.wrapped(self.plain.init(params))

    def _update(
        self, updates: PyTree, state: Any, params: Params = None, **extra: Any
    ) -> tuple[PyTree, OptState]:
        rate = extra.pop("learning_rate", state.hyperparams["learning_rate"])
        check_number("learning_rate", rate)
        with _lock:
            before = [cell.cell_contents for cell in self.rate.cells]
            try:
                for cell, factor in zip(self.rate.cells, before, strict=True):
                    cell.cell_contents = as_float(rate) * (1 if factor > 0 else -1)
                updates, inner = self._inner.update(updates, state.inner_state, params, **extra)
            finally:
                for cell, factor in zip(self.rate.cells, before, strict=True):
                    cell.cell_contents = factor
        return updates, state._replace(inner_state=inner)


def live_rate(optimizer: Any) -> Any:
    """Returns an optimizer with its constant rate in the state; None if it is unknown."""
    if not isinstance(optimizer, ExtendedOptimizer):
        return None if plain_rate(optimizer) is None else LiveRate(optimizer)
    live = live_rate(optimizer.user)
    return None if live is None else dataclasses.replace(optimizer, user=live)


def matched(optimizer: Any, opt_state: OptState) -> tuple[Any, OptState]:
    """Returns an optimizer and a state that both have a live rate, if one of them has it.

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
    """Whether a state looks like that of a `LiveRate`, maybe with options of a task around it."""
    own: Any = opt_state.inner if isinstance(opt_state, ExtendedState) else opt_state
    nodes = [own, *own] if type(own) is tuple else [own]
    return any(is_injected(node) and {*node.hyperparams} == {"learning_rate"} for node in nodes)


def _functions(parts: Iterable[object]) -> Iterator[tuple[FunctionType, dict[str, CellType]]]:
    """Yields the functions among the parts of an optimizer, with the cells of their closures."""
    for part in parts:
        if isinstance(part, FunctionType):
            names = part.__code__.co_freevars
            yield part, dict(zip(names, part.__closure__ or (), strict=True))


def _knows_rate(function: FunctionType, held: dict[str, CellType]) -> bool:
    """Whether a function depends on the rate otherwise than by the factor of `optax.scale`."""
    if function.__qualname__ == _SCALE:
        return False
    if "learning_rate" in held or function.__qualname__.startswith(_OTHERS):
        return True
    decay = held["weight_decay"].cell_contents if "weight_decay" in held else 0.0
    return _is_number(decay) and decay < 0  # Of `optax.fromage`, where it follows from the rate.


def _undoes(chain: dict[str, CellType], rate: Iterable[CellType]) -> bool:
    """Whether a part of a chain normalizes updates that an earlier part has scaled by the rate."""
    is_scaled, ids = False, {id(cell) for cell in rate}
    for update in chain["update_fns"].cell_contents:
        functions = list(_functions(parts_of(update)))
        if is_scaled and any(_normalizes(f.__qualname__) for f, _ in functions):
            return True
        is_scaled |= any(id(cell) in ids for _, held in functions for cell in held.values())
    return False


def _normalizes(name: str) -> bool:
    is_linear = name.startswith(_LINEAR) or "linesearch" in name
    return name.startswith(("scale_by_", "normalize_by_")) and not is_linear


def _is_number(value: object) -> bool:
    is_number = isinstance(value, int | float | np.ndarray | np.generic | jax.Array)
    return is_number and not isinstance(value, bool) and jnp.ndim(value) == 0


def _counts(node: object) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)
