"""OptimizerDef: an Optax transformation whose hyperparameters stay adjustable."""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxfit.optim._arguments import OPTAX_ARGUMENTS
from flaxfit.optim._averaged import like
from flaxfit.optim._filters import Filter
from flaxfit.optim._groups import MultiOptimizer
from flaxfit.optim._hyperparams import check_known, check_number
from flaxfit.optim._optimizer import Adjustable, Optimizer
from flaxfit.optim._overridable import Overridable, as_float
from flaxfit.tree import ArrayLike, Function, OptState, Params, PyTree


class OptimizerDef(Adjustable):
    """Keeps the hyperparameters of an Optax transformation in its state.

    They can be read (`hyperparams(state)`), set (`set_hyperparams(state, learning_rate=0.1)`),
    and overridden for one step (`update(grads, state, params, learning_rate=0.1)`). A set value
    overrides a schedule until it is set to None.

    >>> optimizer = OptimizerDef(optax.adam, learning_rate=optax.linear_schedule(0.1, 0.0, 10))
    >>> optimizer
    OptimizerDef(adam, learning_rate)

    A subclass defines your own optimizer. It passes its hyperparameters to `super().__init__`, by
    name or as one dataclass, and has two methods: `init_param_state(param)` returns the state of a
    parameter, `apply_param_gradient(step, hyper_params, param, state, grad)` the new parameter and
    its new state. As everywhere in Optax, the update that is applied is the difference between the
    new parameter and the old one.

    Args:
      optax_factory: a function that makes an Optax transformation, such as `optax.adam`.
      static: names of arguments that the factory receives unchanged, such as values that it needs
        as Python numbers, and functions that are not schedules.
      **hyperparams: arguments of the factory; the numbers and the schedules among them become
        hyperparameters. `learning_rate=None`: each update is given its rate.

    Raises:
      TypeError: the factory does not take these arguments.
      ValueError: a function among the hyperparameters is not a schedule.
    """

    def __init__(
        self,
        optax_factory: Any = None,
        *unnamed: object,
        static: str | Iterable[str] = (),
        **hyperparams: Any,
    ):
        if unnamed:
            raise TypeError(
                f"OptimizerDef takes hyperparameters by name, got {unnamed}: write "
                "OptimizerDef(optax.adam, learning_rate=1e-3)."
            )
        is_set = dataclasses.is_dataclass(optax_factory)
        self._given: PyTree = optax_factory if is_set else hyperparams
        given = _by_name(self._given)
        _check_names(given)
        fixed = (static,) if isinstance(static, str) else tuple(static)
        is_per_parameter = hasattr(self, "apply_param_gradient")
        if not is_per_parameter:
            _check_factory(optax_factory, given, fixed)
        named = type(self) if is_per_parameter else optax_factory
        self._name = getattr(named, "__name__", type(named).__name__)
        self._live = {
            name: _prepared(name, value)
            for name, value in given.items()
            if name not in fixed and _is_live(value)
        }
        if given.get("learning_rate", 0) is None and (
            is_per_parameter or _needs_rate(optax_factory)
        ):
            self._live["learning_rate"] = _NO_RATE
        others = {name: value for name, value in given.items() if name not in self._live}
        factory = self._per_parameter if is_per_parameter else optax_factory

        def make(**values: ArrayLike) -> optax.GradientTransformation:
            return factory(**others, **values)

        # Optax injects the arguments that the signature names.
        names = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in self._live]
        vars(make)["__signature__"] = inspect.Signature(names)
        dtype = jnp.result_type(float)
        self._injected: Any = optax.inject_hyperparams(make, hyperparam_dtype=dtype)(**self._live)

    def __repr__(self) -> str:
        return f"OptimizerDef({', '.join([self._name, *self._live])})"

    @property
    def hyper_params(self) -> PyTree:
        """The hyperparameters as they were given: by name, or the dataclass."""
        if dataclasses.is_dataclass(self._given):
            return self._given
        return {name: value for name, value in self._given.items() if name in self._live}

    def update_hyper_params(self, *, hyper_params: PyTree = None, **overrides: ArrayLike) -> PyTree:
        """Returns the hyperparameters with some values replaced.

        >>> optimizer.update_hyper_params(learning_rate=0.5)
        {'learning_rate': 0.5}

        Args:
          hyper_params: a set to start from; None: the one that was given.
          **overrides: values by name.

        Raises:
          ValueError: there is no hyperparameter of that name.
        """
        check_known(overrides, self._live, self.describe())
        start = self.hyper_params if hyper_params is None else hyper_params
        is_plain = isinstance(start, Mapping)
        return {**start, **overrides} if is_plain else dataclasses.replace(start, **overrides)

    def create(self, target: Params, focus: Filter | None = None) -> Optimizer:
        """Returns an `Optimizer` of a tree of parameters.

        >>> optimizer.create({"w": jnp.ones(2)}, focus="w").target
        {'w': Array([1., 1.], dtype=float32)}

        Args:
          target: the parameters.
          focus: a filter, as in `MultiOptimizer`: only these parameters are updated.
        """
        if focus is not None:
            return MultiOptimizer((focus, self)).create(target)
        return super().create(target)

    @property
    def known(self) -> Iterable[str]:
        """The names of all hyperparameters."""
        return self._live.keys()

    def describe(self) -> str:
        """Lists the hyperparameters for messages."""
        return str(list(self._live))

    def _init(self, params: Params) -> OptState:
        # Without Optax's step count, which nothing reads: each array in a state costs about a
        # microsecond per step.
        with self._explained():
            return self._injected.init(params)._replace(count=())

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Adds advice to errors of a factory that needs a hyperparameter as a Python number."""
        advice = (
            f"{list(self._live)} are adjustable while {self._name} runs. Name what it needs as a "
            "plain number in static=, such as OptimizerDef(optax.adafactor, ..., "
            "static=('min_dim_size_to_factor',))."
        )
        try:
            yield
        except (
            jax.errors.ConcretizationTypeError,
            jax.errors.TracerIntegerConversionError,
        ) as error:
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
        **extra: ArrayLike,
    ) -> tuple[PyTree, OptState]:
        self.check(extra)
        given = {**self._whole_set(hyper_params), **extra}
        if self._live.get("learning_rate") is _NO_RATE and given.get("learning_rate") is None:
            raise ValueError(
                f"{self!r} was made with learning_rate=None, and an update was given no rate: call "
                "apply_gradient(..., learning_rate=rate), or give a first rate, "
                "OptimizerDef(..., learning_rate=1e-3), which set_hyperparams changes."
            )
        own = {name: self._value(name, given[name], state) for name in self._live if name in given}
        # Optax increments a count; the result is dropped below.
        begun = state._replace(count=0, hyperparams={**state.hyperparams, **own})
        with self._explained():
            updates, new = self._injected.update(updates, begun, params, **{**given, **own})
        # The state keeps the values without this step's overrides.
        kept = {name: self._without_override(name, state) for name in own}
        new = new._replace(count=(), hyperparams={**new.hyperparams, **kept})
        return updates, like(new, state)  # Hyperparameters may be wider.

    def _whole_set(self, hyper_params: PyTree) -> dict[str, PyTree]:
        """Returns an override for every hyperparameter, None if it is not in the set."""
        if hyper_params is None:
            return {}
        values = _by_name(hyper_params)
        if isinstance(hyper_params, Mapping):
            check_known(values, self._live, self.describe())
        return {name: values.get(name) for name in self._live}

    def _value(self, name: str, override: PyTree, state: PyTree) -> jax.Array:
        """Returns the value for one step: the override, else the schedule's or the initial one."""
        live = self._live[name]
        if override is None or callable(override):
            is_schedule = isinstance(live, Overridable)
            override = live.scheduled(state.hyperparams_states[name]) if is_schedule else live
        check_number(name, override)
        return as_float(override)

    def _without_override(self, name: str, state: PyTree) -> ArrayLike:
        live = self._live[name]
        is_schedule = isinstance(live, Overridable)
        return live(state.hyperparams_states[name]) if is_schedule else state.hyperparams[name]

    def _per_parameter(self, **values: ArrayLike) -> optax.GradientTransformation:
        """Returns the transformation of a subclass whose methods take one parameter at a time."""
        own: Any = self
        is_plain = isinstance(self._given, Mapping)
        replace = dataclasses.replace
        hyper_params = SimpleNamespace(**values) if is_plain else replace(self._given, **values)

        def init(params: Params) -> OptimizerState:
            states = jax.tree.map(own.init_param_state, params)
            return OptimizerState(jnp.zeros((), jnp.int32), states)

        def update(
            updates: PyTree, state: PyTree, params: Params = None
        ) -> tuple[PyTree, OptimizerState]:
            if params is None:
                raise ValueError("Pass the parameters: optimizer.update(grads, state, params).")
            leaves, structure = jax.tree.flatten(params)
            states, grads = map(structure.flatten_up_to, (state.param_states, updates))
            moved = [
                own.apply_param_gradient(state.step, hyper_params, *of_one)
                for of_one in zip(leaves, states, grads, strict=True)
            ]
            changes = [new - old for old, (new, _) in zip(leaves, moved, strict=True)]
            states = structure.unflatten([new for _, new in moved])
            return structure.unflatten(changes), OptimizerState(state.step + 1, states)

        return optax.GradientTransformation(init, update)


class OptimizerState(NamedTuple):
    """The state of a subclass of `OptimizerDef` with methods for one parameter."""

    step: ArrayLike
    param_states: PyTree
    """A tree like the parameters, with the state of each."""


_NO_RATE = float("nan")


def _needs_rate(factory: Function) -> bool:
    """Returns whether a factory needs a rate; for `optax.adafactor`, None is one."""
    return inspect.signature(factory).parameters["learning_rate"].default is not None


def _by_name(hyper_params: PyTree) -> dict[str, PyTree]:
    if dataclasses.is_dataclass(hyper_params):
        names = [field.name for field in dataclasses.fields(hyper_params)]
        return {name: getattr(hyper_params, name) for name in names}
    return dict(hyper_params)


def _is_live(value: PyTree) -> bool:
    """Returns whether an argument can be a hyperparameter: a number or a function, not a type."""
    if isinstance(value, bool | type):
        return False
    is_number = isinstance(value, int | float | np.ndarray | np.generic | jax.Array)
    is_number = is_number and jnp.issubdtype(jnp.result_type(value), jnp.number)  # No random key.
    return callable(value) or (is_number and jnp.ndim(value) == 0)


def _check_names(given: Mapping[str, PyTree]) -> None:
    if taken := sorted(OPTAX_ARGUMENTS.intersection(given)):
        raise ValueError(
            f"No hyperparameter can be called {', '.join(taken)}: a step passes an argument of "
            "that name to the optimizer. Give it another name."
        )


def _check_factory(factory: object, given: Mapping[str, PyTree], static: Iterable[str]) -> None:
    if isinstance(factory, optax.GradientTransformation) or not callable(factory):
        raise TypeError(
            "OptimizerDef needs a function that makes an Optax transformation, and its arguments "
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


def _prepared(name: str, value: PyTree) -> PyTree:
    """Makes a constant a float, and a schedule overridable."""
    if not callable(value):
        return float(value) if isinstance(value, int | float | np.generic) else as_float(value)
    if not isinstance(value, optax.schedules.StatefulSchedule):
        _check_schedule(name, value)
    return Overridable(name, value)


def _check_schedule(name: str, value: Function) -> None:
    try:
        at_0 = jax.eval_shape(value, jax.ShapeDtypeStruct((), jnp.int32))
        is_schedule = at_0.shape == () and jnp.issubdtype(at_0.dtype, jnp.number)
    except Exception:
        is_schedule = False
    if not is_schedule:
        raise ValueError(
            f"{name} is a function, but not a schedule: it does not map a step to a number. If the "
            f"optimizer needs the function itself, name it in static=({name!r},)."
        )
