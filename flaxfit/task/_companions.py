"""Companions: frozen models that an objective calls, such as a teacher."""

import inspect
import keyword
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from flaxfit.modules._handle import is_module
from flaxfit.modules._switch import as_apply, functions_of
from flaxfit.tree import Function, Variables, flat, parameters

_POSITIONAL = ("apply", "batch", "rngs")
_RESERVED = (*_POSITIONAL, "ema")
"""The other arguments of an objective."""


class Companion(NamedTuple):
    """A frozen model that an objective calls besides the trained one."""

    apply: Function
    """`apply(variables, *inputs)`, in evaluation mode."""
    variables: Variables
    given: tuple[Any, ...]
    """The objects that it was made from, to compare companions by identity."""
    source: "Source | None" = None
    """The NNX module that it was made from, whose variables may change."""


class Source(NamedTuple):
    """An NNX module as a source of variables."""

    values: Callable[[], list[Any]]
    """Returns the present arrays of its variables, without copies."""
    seen: list[Any]
    """The arrays at the time of the latest read, to detect changes by identity."""
    read: Callable[[], Variables]
    """Returns copies of its present variables."""


def are_same(some: Mapping[str, Companion], others: Mapping[str, Companion]) -> bool:
    """Returns whether the companions of two tasks were made from the same objects."""
    return some.keys() == others.keys() and all(
        a is b for name in some for a, b in zip(some[name].given, others[name].given, strict=False)
    )


def as_companions(owner: str, task: Any) -> Mapping[str, Companion]:
    """Normalizes the companions of a task, and checks them against its objective."""
    given = {} if task.companions is None else task.companions
    if not isinstance(given, Mapping):
        raise TypeError(
            "companions must be a mapping by name, such as {'teacher': (module, variables)}, got "
            f"{given!r:.80}."
        )
    if task.objective is None:
        if given:
            raise ValueError(
                "companions need an objective, which is called with them: "
                f"{owner}(objective=f, companions=...), f(apply, batch, rngs, {next(iter(given))})."
            )
        return {}
    for name in given:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(
                f"The name of a companion must be a valid keyword argument, got {name!r:.60}."
            )
        if name in _RESERVED:
            raise ValueError(
                f"A companion cannot be called {name!r}: the objective has the arguments "
                f"{', '.join(_RESERVED)} already."
            )
    _check_keywords(task.objective, given)
    if all(isinstance(each, Companion) for each in given.values()):
        return given  # The companions of another task keep their identity, and so their arrays.
    return {name: _as_companion(f"The companion {name!r}", each) for name, each in given.items()}


def _as_companion(owner: str, given: Any) -> Companion:
    if isinstance(given, Companion):
        return given
    if is_module(given) and not isinstance(given, nn.Module | type):
        from flaxfit.modules._nnx_state import values_of

        functions, values = functions_of(given, train=False), values_of(given)
        source = Source(values, values(), lambda: functions.init(None))
        return Companion(functions.apply, functions.init(None), (given,), source)
    if not isinstance(given, tuple) or len(given) != 2:
        hint = ""
        if hasattr(given, "module") and hasattr(type(given), "state"):
            hint = " Give the module of a Model: (model.module, model.state.variables)."
        raise TypeError(
            f"{owner} must be (apply, variables), (Linen module, variables), (NNX class, "
            f"variables) or an NNX module, got {given!r:.80}.{hint}"
        )
    apply, variables = given
    if not isinstance(variables, Mapping) or "params" not in variables:
        hint = " Give state.variables." if hasattr(variables, "model_state") else ""
        raise TypeError(
            f"{owner} needs variables such as {{'params': ...}}, with the model's other "
            f"collections, got {variables!r:.80}.{hint}"
        )
    _check_arrays(owner, variables)
    return Companion(as_apply(owner, apply, train=False), variables, given)


def _check_arrays(owner: str, variables: Variables) -> None:
    for path, leaf in flat(variables).items():
        is_number = isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex)
        if not is_number or isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "OSU":
            raise TypeError(f"{owner} needs arrays of numbers, and {path} is {leaf!r:.80}.")


def _check_keywords(objective: Function, names: Mapping[str, Any]) -> None:
    """Checks that an objective accepts these companions by keyword, and requires no others."""
    found = list(parameters(objective).values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [each for each in found if each.kind in positional]
    rest = places[len(_POSITIONAL) :] + [each for each in found if each.kind is each.KEYWORD_ONLY]
    by_name = [each for each in rest if each.kind is not each.POSITIONAL_ONLY]
    taken = [each.name for each in by_name]
    takes_any = not found or any(each.kind is each.VAR_KEYWORD for each in found)
    if unknown := [name for name in names if name not in taken and not takes_any]:
        raise ValueError(
            f"The objective has no parameter for the companions {', '.join(unknown)}: define it as "
            f" f(apply, batch, rngs, {', '.join(names)})."
        )
    required = [each.name for each in by_name if each.default is each.empty]
    if missing := [name for name in required if name not in (*names, "ema")]:
        raise ValueError(
            f"The objective has parameters for the companions {', '.join(missing)}, but there is "
            f"{', '.join(names) or 'none'}: pass "
            f"companions={{{missing[0]!r}: (module, variables)}}."
        )
