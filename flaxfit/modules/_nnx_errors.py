"""Explains errors of a call of an NNX module, naming the layer that raised them."""
# This imports NNX: import it only where a model is an NNX module.

import contextlib
import re
import traceback
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from flaxfit.tree import PyTree

_MISFIT = (
    "dot_general requires|conv_general_dilated|[Ii]ncompatible (shapes|input dim)"
    "|cannot reshape array|Size of label"
)


@contextlib.contextmanager
def misfits_explained(module: nnx.Module, inputs: PyTree) -> Iterator[None]:
    """Explains errors of a Flax layer that was made for other shapes.

    Raises:
      ValueError: from the original error.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        layer = _layer_of(error) if re.search(_MISFIT, str(error)) else None
        if layer is None:
            raise
        given = ", ".join(str(tuple(x.shape)) for x in jax.tree.leaves(inputs))
        raise ValueError(
            f"The model cannot take inputs of shape {given}: its {_described(layer, module)} "
            f"expects other shapes. Pass inputs that fit it, or build the layer for these. {error}"
        ) from error


@contextlib.contextmanager
def rngs_explained(position: int | None, n_inputs: int, is_keyless: bool) -> Iterator[None]:
    """Explains errors of a call that concern its argument `rngs`."""
    if position is not None and n_inputs > position:
        raise TypeError(
            f"The call has rngs as argument {position + 1}, and there are {n_inputs} inputs: write "
            "(self, x, y, *, rngs=None), or give the inputs by name."
        )
    try:
        yield
    except (AttributeError, TypeError) as error:
        if position is None or not is_keyless or "NoneType" not in str(error):
            raise
        raise ValueError(
            f"The call failed without rngs, as in evaluation: {error}. To draw random numbers in "
            "evaluation as well, name the streams: Model(..., eval_rngs=('noise',)) or "
            "EvalTask(..., rngs=('noise',)). Else test `rngs is None` in the call."
        ) from error


def _layer_of(error: Exception) -> Any:
    """Returns the module whose method raised an error, if it is Flax's own."""
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = next((x for x in reversed(owners) if isinstance(x, nnx.Module)), None)
    return module if type(module).__module__.startswith("flax.") else None


def _described(layer: nnx.Module, module: nnx.Module) -> str:
    path = next((path for path, part in nnx.iter_modules(module) if part is layer), ())
    where = f" at {'/'.join(map(str, path))}" if path else ""
    shapes = [
        f"{'/'.join(map(str, path))} {tuple(variable.shape)}"
        for path, variable in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    ]
    return f"{type(layer).__name__}{where} ({', '.join(shapes)})"
