"""ModuleHandle: the module behind an `apply` function."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from flax import linen as nn

from flaxfit.tree import Function, Variables

_NAME = "_flaxfit_module"


class ModuleHandle(NamedTuple):
    """The known facts about the module that an `apply` belongs to.

    JAX keeps the functions that it has traced, so this must not keep the arrays of an instance.
    """

    module: Callable[[], Any]
    """Returns what the user gave, an instance, a class or a factory; None if it is gone."""
    init: Callable[[Any], Function]
    """Returns the `init` of that module."""
    merged: Callable[[Variables], Any]
    """Returns a module that holds these variables, in evaluation mode."""
    inputs: Callable[[], tuple[str, ...] | None]
    """Returns the names of the inputs of its call; None if it takes any, or they are unknown."""
    evaluated: Callable[[], Function]
    """Returns its `apply` in evaluation mode."""
    assign: Callable[[Variables], list[Any]] | None = None
    """Writes variables into an NNX instance, if it still exists, and returns the arrays that it
    now holds; None for other modules."""
    paths: Callable[[Any], dict[str, bool]] | None = None
    """Maps the paths of all variables to whether an NNX filter selects them; None for linen."""
    streams: frozenset[str] | None = None
    """The names of its random streams; None if it takes any name."""


def with_handle(apply: Function, handle: ModuleHandle) -> Function:
    """Attaches the handle of a module to its `apply`, and returns that."""
    setattr(apply, _NAME, handle)
    return apply


def attached(apply: object) -> ModuleHandle | None:
    """Returns the handle that `with_handle` attached to a function, or None."""
    return getattr(apply, _NAME, None)


def is_module(given: object) -> bool:
    """Whether this is a Linen module, an NNX module, or a class of NNX modules."""
    if isinstance(given, nn.Module):
        return True
    # A user of NNX has imported it; nobody else should pay for its import.
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    return issubclass(given if isinstance(given, type) else type(given), nnx.Module)
