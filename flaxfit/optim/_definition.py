"""OptimizerDef: an optax transformation whose hyperparameters stay adjustable."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxfit.optim._adjustable import Adjustable
from flaxfit.optim._filters import Filter
from flaxfit.optim._groups import MultiOptimizer
from flaxfit.optim._hyperparams import check_known, check_number
from flaxfit.optim._optimizer import Optimizer
from flaxfit.optim._overridable import Overridable, as_float
from flaxfit.optim._per_parameter import per_parameter
from flaxfit.tree._types import ArrayLike, OptState, Params, PyTree


class OptimizerDef(Adjustable):
    """An optax transformation whose hyperparameters live in its state.

    They can be read (`hyperparams(state)`), set (`set_hyperparams(state, learning_rate=0.1)`),
    and overridden for one step (`update(grads, state, params, learning_rate=0.1)`). What was set
    beats a schedule until it is set to None.

    >>> optimizer = OptimizerDef(optax.adam, learning_rate=optax.linear_schedule(0.1, 0.0, 10))
    >>> optimizer
    OptimizerDef(adam, learning_rate)

    A subclass is an optimizer of one's own. It passes its hyperparameters to `super().__init__`,
    by name or as one dataclass, and has two methods: `init_param_state(param)` returns the state
    of a parameter, `apply_param_gradient(step, hyper_params, param, state, grad)` the new
    parameter and its new state. As everywhere in optax, what is applied is the difference between
    the new parameter and the old one.

    Args:
      optax_factory: a function that makes an optax transformation, such as `optax.adam`.
      static: names of arguments that the factory is given as they are, such as numbers that it
        must know as such, and functions that are not schedules.
      **hyperparams: arguments of the factory; the numbers and the schedules among them become
        hyperparameters.

    Raises:
      TypeError: the factory does not take these arguments.
      ValueError: a function among the hyperparameters is not a schedule.
    """

    def __init__(
        self, optax_factory: Any = None, *unnamed: Any, static: Any = (), **hyperparams: Any
    ):
        if unnamed:
            raise TypeError(
                f"OptimizerDef takes hyperparameters by name, got {unnamed}: write "
                "OptimizerDef(optax.adam, learning_rate=1e-3)."
            )
        is_set = dataclasses.is_dataclass(optax_factory)
        self._given: Any = optax_factory if is_set else hyperparams
        given = _by_name(self._given)
        fixed = (static,) if isinstance(static, str) else tuple(static)
        is_own = hasattr(self, "apply_param_gradient")
        if not is_own:
            _check_factory(optax_factory, given, fixed)
        named = type(self) if is_own else optax_factory
        self._name = getattr(named, "__name__", type(named).__name__)
        factory = self._make_own if is_own else optax_factory
        self._live = {
            name: _prepared(name, value)
            for name, value in given.items()
            if name not in fixed and _is_live(value)
        }
        others = {name: value for name, value in given.items() if name not in self._live}

        def make(**values: Any) -> Any:
            return factory(**others, **values)

        self._make: Any = tuple if is_own else functools.partial(optax_factory, **given)
        # optax injects what the signature names.
        names = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in self._live]
        vars(make)["__signature__"] = inspect.Signature(names)
        dtype = jnp.result_type(float)
        self._injected: Any = optax.inject_hyperparams(make, hyperparam_dtype=dtype)(**self._live)

    def __repr__(self) -> str:
        return f"OptimizerDef({', '.join([self._name, *self._live])})"

    @property
    def transformations(self) -> tuple[Any, ...]:
        """What the factory makes of the hyperparameters as they were given, if it does."""
        with contextlib.suppress(Exception):
            return (self._make(),)
        return ()

    @property
    def hyper_params(self) -> PyTree:
        """The set of hyperparameters as it was given: by name, or the dataclass."""
        if dataclasses.is_dataclass(self._given):
            return self._given
        return {name: value for name, value in self._given.items() if name in self._live}

    def update_hyper_params(self, *, hyper_params: PyTree = None, **overrides: ArrayLike) -> PyTree:
        """The set of hyperparameters with some values replaced.

        Args:
          hyper_params: a set in place of the one that was given.
          **overrides: values by name.

        Raises:
          ValueError: there is no hyperparameter of that name.
        """
        check_known(overrides, self._live, self.describe())
        start = self.hyper_params if hyper_params is None else hyper_params
        is_plain = isinstance(start, Mapping)
        return {**start, **overrides} if is_plain else dataclasses.replace(start, **overrides)

    def create(self, target: PyTree, focus: Filter | None = None) -> Optimizer:
        """An `Optimizer` of the target, which is a tree of parameters.

        Args:
          target: the parameters.
          focus: a filter, as of `MultiOptimizer`: only these parameters are updated.
        """
        if focus is not None:
            return MultiOptimizer((focus, self)).create(target)
        return super().create(target)

    @property
    def known(self) -> Iterable[str]:
        """The names of all hyperparameters."""
        return self._live.keys()

    def describe(self) -> str:
        """The hyperparameters in words."""
        return str(list(self._live))

    def _init(self, params: Params) -> OptState:
        # Without optax's count of the steps, which nothing reads: each array in a state takes about
        # a microsecond of every step.
        with self._explained():
            return self._injected.init(params)._replace(count=())

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Says what to do when the factory cannot work with a number that may change."""
        advice = (
            f"{list(self._live)} are adjustable while {self._name} runs. What it needs as a plain "
            "number is to be named in static=, such as OptimizerDef(optax.adafactor, ..., "
            "static=('min_dim_size_to_factor',))."
        )
        try:
            yield
        except _NEEDS_A_NUMBER as error:
            raise TypeError(f"{self._name} needs the plain value of a number. {advice}") from error
        except TypeError as error:
            error.add_note(advice)
            raise

    def _update(
        self,
        updates: PyTree,
        state: PyTree,
        params: Params = None,
        *,
        hyper_params: PyTree = None,
        **extra: Any,
    ) -> tuple[PyTree, OptState]:
        self.check(extra)
        given = {**self._whole_set(hyper_params), **extra}
        own = {name: self._value(name, given[name], state) for name in self._live if name in given}
        begun: Any = state._replace(count=0, hyperparams={**state.hyperparams, **own})
        with self._explained():
            updates, new = self._injected.update(updates, begun, params, **{**given, **own})
        # What is overridden for one step leaves no trace.
        standing = {name: self._standing(name, state) for name in own}
        new = new._replace(count=(), hyperparams={**new.hyperparams, **standing})
        return updates, jax.tree.map(_as_before, new, state)

    def _whole_set(self, hyper_params: PyTree) -> dict[str, PyTree]:
        """The overrides that a set stands for: one for every hyperparameter."""
        if hyper_params is None:
            return {}
        values = _by_name(hyper_params)
        if isinstance(hyper_params, Mapping):
            check_known(values, self._live, self.describe())
        return {name: values.get(name) for name in self._live}

    def _value(self, name: str, override: Any, state: PyTree) -> jax.Array:
        """The value for one step; without an override, the initial value or the schedule's."""
        live = self._live[name]
        if override is None or callable(override):
            is_schedule = isinstance(live, Overridable)
            override = live.scheduled(state.hyperparams_states[name]) if is_schedule else live
        check_number(name, override)
        return as_float(override)

    def _standing(self, name: str, state: PyTree) -> PyTree:
        """The value without this step's override."""
        live = self._live[name]
        is_schedule = isinstance(live, Overridable)
        return live(state.hyperparams_states[name]) if is_schedule else state.hyperparams[name]

    def _make_own(self, **values: ArrayLike) -> optax.GradientTransformation:
        """The transformation of a subclass that has methods for one parameter."""
        own: Any = self
        is_plain = isinstance(self._given, Mapping)
        replace = dataclasses.replace
        hyper_params = SimpleNamespace(**values) if is_plain else replace(self._given, **values)

        def apply(step: ArrayLike, param: ArrayLike, state: PyTree, grad: ArrayLike) -> PyTree:
            return own.apply_param_gradient(step, hyper_params, param, state, grad)

        return per_parameter(own.init_param_state, apply)


_NEEDS_A_NUMBER = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
)


def _by_name(hyper_params: PyTree) -> dict[str, PyTree]:
    if dataclasses.is_dataclass(hyper_params):
        names = [field.name for field in dataclasses.fields(hyper_params)]
        return {name: getattr(hyper_params, name) for name in names}
    return dict(hyper_params)


def _is_live(value: Any) -> bool:
    """Whether an argument can be a hyperparameter: a number or a function, but no type."""
    if isinstance(value, bool | type):
        return False
    is_number = isinstance(value, int | float | np.ndarray | np.generic | jax.Array)
    is_number = is_number and jnp.issubdtype(jnp.result_type(value), jnp.number)  # No random key.
    return callable(value) or (is_number and jnp.ndim(value) == 0)


def _check_factory(factory: Any, given: Mapping[str, Any], static: Iterable[str]) -> None:
    if isinstance(factory, optax.GradientTransformation) or not callable(factory):
        raise TypeError(
            "OptimizerDef needs a function that makes an optax transformation, and its arguments "
            f"by name, such as OptimizerDef(optax.adam, learning_rate=1e-3), got {factory!r:.80}."
        )
    if unknown := [name for name in static if name not in given]:
        raise ValueError(f"static names {unknown}, but the arguments are {list(given)}.")
    signature = inspect.signature(factory)
    try:
        signature.bind(**given)
    except TypeError as error:
        raise TypeError(
            f"Cannot make {getattr(factory, '__name__', factory)} of {list(given)}: {error}. It "
            f"takes {', '.join(signature.parameters)}."
        ) from None


def _prepared(name: str, value: Any) -> Any:
    """A constant as a float, a schedule as one that can be overridden."""
    if not callable(value):
        return float(value) if isinstance(value, int | float | np.generic) else as_float(value)
    if not isinstance(value, optax.schedules.StatefulSchedule):
        _check_schedule(name, value)
    return Overridable(name, value)


def _check_schedule(name: str, value: Any) -> None:
    try:
        at_0 = jax.eval_shape(value, jax.ShapeDtypeStruct((), jnp.int32))
        is_schedule = at_0.shape == () and jnp.issubdtype(at_0.dtype, jnp.number)
    except Exception:
        is_schedule = False
    if not is_schedule:
        raise ValueError(
            f"{name} is a function, but not a schedule: it does not turn a step into a number. If "
            f"the optimizer takes it as it is, name it in static=({name!r},)."
        )


def _as_before(new: PyTree, old: PyTree) -> PyTree:
    """A new leaf of a state in the dtype of the old one, as hyperparameters may be more precise."""
    return new.astype(old.dtype) if new.dtype != old.dtype else new
