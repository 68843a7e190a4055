"""ModuleHandle: what other rooms may ask of the module behind an `apply` function."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from flax import linen as nn

from flaxfit.tree._types import Function, PyTree, Variables

_NAME = "_flaxfit_module"


class ModuleHandle(NamedTuple):
    """A module, and how to get functions and a trained module of it."""

    module: Any
    """What the user gave: an instance, a class or a factory."""
    init: Function
    """The function that makes its variables."""
    merged: Callable[[Variables], Any]
    """Returns a module that holds these variables, in evaluation mode."""
    assign: Callable[[Variables], None] | None = None
    """Writes variables into an nnx instance; None for everything else."""
    paths: Callable[[Any], dict[str, bool]] | None = None
    """Maps the paths of all variables to whether an NNX filter selects them; None for linen."""
    streams: frozenset[str] | None = None
    """The names of its random streams; None where any name may be used."""


def with_handle(apply: Function, handle: ModuleHandle) -> Function:
    """Attaches the handle of a module to its `apply`, and returns that."""
    setattr(apply, _NAME, handle)
    return apply


def attached(apply: object) -> ModuleHandle | None:
    """Returns the handle that `with_handle` attached to a function, or None."""
    return getattr(apply, _NAME, None)


def is_module(given: object) -> bool:
    """Whether this is a linen module, an nnx module, or a class of nnx modules."""
    if isinstance(given, nn.Module):
        return True
    # A user of nnx has imported it; nobody else should pay for its import.
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    return issubclass(given if isinstance(given, type) else type(given), nnx.Module)


def module_in(outputs: PyTree) -> object:
    """Returns the nnx module among the outputs of a call, or None."""
    nnx = sys.modules.get("flax.nnx")
    found = outputs if isinstance(outputs, tuple | list) else (outputs,)
    return next((x for x in found if nnx is not None and isinstance(x, nnx.Module)), None)
