"""Makes a JaxModule of a trained state, and writes it in a format by name."""

import os
from typing import Any

import jax

from flaxfit.export._compare import ExportReport
from flaxfit.export._module import JaxModule
from flaxfit.export._onnx import save_onnx
from flaxfit.export._saved_model import save_saved_model
from flaxfit.export._spec import Specs
from flaxfit.export._stablehlo import save
from flaxfit.modules._switch import as_apply
from flaxfit.tree import Params, PyTree

_WRITERS = {"stablehlo": save, "saved_model": save_saved_model, "onnx": save_onnx}


def from_state(
    state: PyTree,
    apply: Any,
    input_spec: Specs,
    *,
    params: Params = None,
    trainable: bool = False,
) -> JaxModule:
    """Makes a JaxModule of a trained state, with `state.variables` as parameters.

    >>> import numpy as np
    >>> from flaxfit import Checkpoint, InferenceState
    >>> from flaxfit.export import InputSpec
    >>> state = InferenceState(np.int32(0), {"w": np.float32(3)}, {})
    >>> checkpoint = Checkpoint(step=0, state=state, metrics={})
    >>> module = from_state(checkpoint, lambda v, x: v["params"]["w"] * x, InputSpec(("batch",)))
    >>> list(module.named_params)
    ['params.w']

    Args:
      state: a `TrainState`, an `InferenceState` or a `Checkpoint`.
      apply: a module, or its `apply(variables, *inputs)` in evaluation mode: dropout off,
        statistics frozen.
      input_spec: the spec of the inputs, as in `JaxModule`.
      params: parameters to export instead of the state's, such as their moving average.
      trainable: whether TensorFlow may train the parameters (never the other collections).
    """
    apply = as_apply("from_state", apply, train=False)
    state = getattr(state, "state", state)
    variables = {"params": state.params if params is None else params, **state.model_state}
    flags = {
        name: jax.tree.map(lambda _, flag=trainable and name == "params": flag, collection)
        for name, collection in variables.items()
    }
    return JaxModule(variables, apply, input_spec=input_spec, trainable=flags)


def write(
    module: JaxModule, path: str | os.PathLike[str], format: str = "stablehlo", **options: Any
) -> ExportReport:
    """Writes a module in the format of that name.

    >>> write(None, "model", "tflite")
    Traceback (most recent call last):
    ValueError: format must be one of 'stablehlo', 'saved_model', 'onnx', got 'tflite'.

    Args:
      module: the module to write.
      path: the file, or the folder of a SavedModel.
      format: "stablehlo", "saved_model" or "onnx".
      **options: options of `save`, `save_saved_model` or `save_onnx`.
    """
    check_format(format)
    return _WRITERS[format](module, path, **options)


def check_format(format: str) -> None:
    """Checks that there is a format of that name."""
    if format not in _WRITERS:
        names = ", ".join(map(repr, _WRITERS))
        raise ValueError(f"format must be one of {names}, got {format!r}.")
