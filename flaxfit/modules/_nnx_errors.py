"""Explains errors of a call of an NNX module, naming the layer that raised them."""
# This imports NNX: import it only where a model is an NNX module.

import contextlib
import re
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from flaxfit.tree import PyTree

_MISFIT = (
    "dot_general requires|conv_general_dilated|[Ii]ncompatible (shapes|input dim)"
    "|cannot reshape array|Size of label"
)


@contextlib.contextmanager
def call_explained(
    module: nnx.Module, inputs: Sequence[PyTree], named: PyTree, rngs_at: int | None, has_keys: bool
) -> Iterator[None]:
    """Explains errors of a layer that was made for other shapes, and of the argument `rngs`.

    `rngs_at` is the position of `rngs` among the arguments of the call; None if it takes none.
    """
    if rngs_at is not None and len(inputs) > rngs_at:
        raise TypeError(
            f"The call has rngs as argument {rngs_at + 1}, and there are {len(inputs)} inputs: "
            "write (self, x, y, *, rngs=None), or give the inputs by name."
        )
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        layer = _layer_of(error) if re.search(_MISFIT, str(error)) else None
        if layer is not None:
            given = ", ".join(str(tuple(x.shape)) for x in jax.tree.leaves((inputs, named)))
            raise ValueError(
                f"The model cannot take inputs of shape {given}: its {_described(layer, module)} "
                "expects other shapes. Pass inputs that fit it, or build the layer for these. "
                f"{error}"
            ) from error
        is_of_none = "NoneType" in str(error) and not isinstance(error, ValueError)
        if rngs_at is not None and not has_keys and is_of_none:
            raise ValueError(
                f"The call failed without rngs, as in evaluation: {error}. To draw random numbers "
                "in evaluation as well, name the streams: Model(..., eval_rngs=('noise',)) or "
                "EvalTask(..., rngs=('noise',)). Else test `rngs is None` in the call."
            ) from error
        raise


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
