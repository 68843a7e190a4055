"""ONNX: a method as one file that onnxruntime and others run."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxfit.display import first_line
from flaxfit.export._compare import RTOL, ExportReport, write_compared
from flaxfit.export._module import DEFAULT_METHOD_KEY, JaxModule, check_is_module
from flaxfit.export._names import input_names, output_names
from flaxfit.export._spec import Specs, shape_structs
from flaxfit.tree import Function, PyTree, required


def save_onnx(
    module: JaxModule,
    path: str | os.PathLike[str],
    *,
    method: str | None = None,
    opset: int = 21,
    samples: Sequence[PyTree] | None = None,
    rtol: float = RTOL,
) -> ExportReport:
    """Writes a method of a module as ONNX; its weights become constants.

    Inputs and outputs have the names that `save_saved_model` gives them, symbolic dimensions
    keep theirs; constraints are not written. The file is run by onnxruntime and compared with
    the module before it takes its place.

    >>> import tempfile
    >>> import jax2onnx, onnxruntime
    >>> from flaxfit.export import InputSpec
    >>> module = JaxModule({"w": 2.0}, lambda p, x: p["w"] * x, input_spec=InputSpec(("n",)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = save_onnx(module, f"{folder}/double.onnx")
    ...     double = onnxruntime.InferenceSession(f"{folder}/double.onnx")
    >>> double.run(None, {"inputs": np.float32([1, 2])})[0].tolist()
    [2.0, 4.0]

    Args:
      module: the module to write.
      path: the file; an existing one is replaced.
      method: the method to write; None: the default or only one.
      opset: the version of ONNX's operators.
      samples: inputs to compare on, each a tuple, if random ones make no sense.
      rtol: how far an output may be off, relative to its largest value.

    Raises:
      ValueError: the file differs from the module, or an operation has no counterpart in ONNX;
        nothing is written.
      ImportError: jax2onnx or onnxruntime is not installed.
    """
    check_is_module(module)
    packages = "jax2onnx", "onnxruntime"
    jax2onnx, onnxruntime = (required("Writing ONNX", each, "onnx") for each in packages)
    name = _chosen(module, method)
    specs = module.method_specs[name].input_spec
    structs = shape_structs(specs)
    structure = jax.tree.structure(specs)
    params = module.named_params
    function = module.method_specs[name].function
    outputs = jax.eval_shape(function, params, structs)

    def flat(*leaves: PyTree) -> tuple[PyTree, ...]:
        return tuple(jax.tree.leaves(function(params, jax.tree.unflatten(structure, leaves))))

    try:
        made = jax2onnx.to_onnx(
            flat,
            jax.tree.leaves(structs),
            model_name=name,
            opset=opset,
            input_names=input_names(specs),
            output_names=output_names(outputs),
        )
    except Exception as error:
        raise ValueError(
            f"Cannot write {name!r} as ONNX: jax2onnx has no counterpart for something in it "
            f"({first_line(error)})."
        ) from error

    def write(temporary: Path) -> dict[str, Function]:
        temporary.write_bytes(made.SerializeToString())
        session = onnxruntime.InferenceSession(str(temporary), providers=["CPUExecutionProvider"])
        return {name: _as_function(session, specs, jax.tree.structure(outputs))}

    with jax.default_device(jax.devices("cpu")[0]):
        return write_compared(module, path, "ONNX", write, samples=samples, rtol=rtol)


def _chosen(module: JaxModule, method: str | None) -> str:
    names = list(module.method_specs)
    if method is None:
        method = names[0] if len(names) == 1 else DEFAULT_METHOD_KEY
    if method not in names:
        raise ValueError(f"An ONNX file holds one method: pass method=, one of {', '.join(names)}.")
    return method


def _as_function(session: Any, specs: Specs, structure: PyTree) -> Function:
    def run(*inputs: PyTree, **named: PyTree) -> PyTree:
        leaves = map(np.asarray, jax.tree.leaves(named or inputs))
        by_name = dict(zip(input_names(specs), leaves, strict=True))
        # The file lacks inputs that the method does not use.
        used = {i.name for i in session.get_inputs()}
        found = session.run(None, {name: x for name, x in by_name.items() if name in used})
        return jax.tree.unflatten(structure, found)

    return run
