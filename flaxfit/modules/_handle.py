"""ModuleHandle: the module that an `apply` function belongs to."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from flax import linen as nn

from flaxfit.tree import Function, Variables

_NAME = "_flaxfit_module"


class ModuleHandle(NamedTuple):
    """The known facts about the module that an `apply` belongs to.

    JAX caches traced functions, so a handle must not hold the arrays of an instance.
    """

    module: Callable[[], Any]
    """Returns the user's instance, class or factory; None if it was garbage collected."""
    init: Callable[[Any], Function]
    """Returns the `init` of that module."""
    merged: Callable[[Variables], Any]
    """Returns a module with these variables, in evaluation mode."""
    inputs: Callable[[], tuple[str, ...] | None]
    """Returns the names of the inputs of its call; None: any, or unknown."""
    evaluated: Callable[[], Function]
    """Returns its `apply` in evaluation mode."""
    assign: Callable[[Variables], list[Any]] | None = None
    """Writes variables into an NNX instance, if it still exists, and returns its new arrays; None
    for other modules."""
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
    """Returns whether this is a Linen module, an NNX module, or a class of NNX modules."""
    if isinstance(given, nn.Module):
        return True
    # A user of NNX has imported it; nobody else should pay for its import.
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    return issubclass(given if isinstance(given, type) else type(given), nnx.Module)
