"""SavedModel: a module as TensorFlow serves it, and trains it, without JAX."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from flaxfit.export._compare import RTOL, ExportReport, write_compared
from flaxfit.export._module import DEFAULT_METHOD_KEY, JaxModule, check_is_module
from flaxfit.export._names import from_names, input_names, output_names
from flaxfit.export._program import PLATFORMS, PORTABLE
from flaxfit.export._spec import Specs, call_with
from flaxfit.export._tensorflow import Tensor, TensorFlowModule, import_tensorflow, tensor_specs
from flaxfit.tree import Function, PyTree


def save_saved_model(
    module: JaxModule,
    path: str | os.PathLike[str],
    *,
    platforms: Sequence[str] = PLATFORMS,
    gradients: bool = True,
    stablehlo_version: str = PORTABLE,
    samples: Sequence[PyTree] | None = None,
    rtol: float = RTOL,
) -> ExportReport:
    """Writes a module as a TensorFlow SavedModel: a folder that needs TensorFlow 2.20, not JAX.

    The object that `tf.saved_model.load` returns has a method of each name (a single function is
    called as the object itself), `variables` and `trainable_variables`. Each method is a signature
    as well, a single one "serving_default": its inputs are named "inputs", or by keyword or path
    ("inputs_0"), its outputs "outputs" or by path.

    The folder is read again and compared with the module before it takes its place.

    >>> import tempfile
    >>> import tensorflow as tf
    >>> from flaxfit.export import InputSpec
    >>> module = JaxModule({"w": 2.0}, lambda p, x: p["w"] * x, input_spec=InputSpec(("n",)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = save_saved_model(module, f"{folder}/double")
    ...     double = tf.saved_model.load(f"{folder}/double")
    >>> double(tf.constant([1.0, 2.0])).numpy().tolist()
    [2.0, 4.0]

    Args:
      module: the module to write; its `trainable` parameters can be trained in TensorFlow.
      path: the folder; an existing SavedModel is replaced.
      platforms: the platforms that can run it, of "cpu", "cuda", "rocm" and "tpu".
      gradients: whether the loaded model can be differentiated.
      stablehlo_version: the version of the programs; TensorFlow must know it.
      samples: inputs to compare on, each a tuple, if random ones make no sense.
      rtol: how far an output may be off, relative to its largest value.

    Raises:
      ValueError: the folder differs from the module, or the model cannot be exported; nothing is
        written.
      ImportError: TensorFlow is not installed.
    """
    check_is_module(module)
    tf = import_tensorflow()
    if module.with_gradient and not gradients:
        raise ValueError(
            "Cannot write trainable parameters with gradients=False: nothing could train them. "
            "Make the module with trainable=False, or write the gradients."
        )
    made = TensorFlowModule(
        module.method_specs.values(),
        module.named_params,
        module.trainable,
        platforms,
        stablehlo_version,
        gradients,
    )
    if gradients:
        made.make_gradients()  # Else TensorFlow would hide why a gradient fails.
    saved, signatures = tf.train.Checkpoint(), {}
    saved.variables, saved.trainable_variables = made.variables, made.trainable_variables
    for name, function in made.methods.items():
        specs = module.method_specs[name].input_spec
        # Trace for the open shapes: TensorFlow saves only traced functions.
        call_with(function.get_concrete_function, tensor_specs(specs))
        is_default = name == DEFAULT_METHOD_KEY
        setattr(saved, "__call__" if is_default else name, function)
        key = "serving_default" if is_default or len(made.methods) == 1 else name
        signatures[key] = _signature(function, specs)

    def write(temporary: Path) -> Mapping[str, Function] | None:
        options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
        tf.saved_model.save(saved, str(temporary), signatures=signatures, options=options)
        if "cpu" not in platforms:
            return None
        loaded = tf.saved_model.load(str(temporary))
        return {name: _as_numpy(loaded, name) for name in made.methods}

    with jax.default_device(jax.devices("cpu")[0]):
        return write_compared(
            module, path, "SavedModel", write, samples=samples, rtol=rtol, folder=True
        )


def _signature(function: Function, specs: Specs) -> Function:
    tf = import_tensorflow()

    def signature(**named: Tensor) -> dict[str, Tensor]:
        outputs = call_with(function, from_names(specs, named))
        return dict(zip(output_names(outputs), jax.tree.leaves(outputs), strict=True))

    flat = zip(input_names(specs), jax.tree.leaves(specs), strict=True)
    tensors = {name: tensor_specs(spec, name) for name, spec in flat}
    return tf.function(signature, autograph=False).get_concrete_function(**tensors)


def _as_numpy(loaded: Any, name: str) -> Function:
    """Makes a function of NumPy arrays from a method of a loaded SavedModel."""
    tf = import_tensorflow()

    def method(*inputs: PyTree, **named: PyTree) -> PyTree:
        # Look it up here to keep `loaded` alive: a function has only weak references to variables.
        function = loaded if name == DEFAULT_METHOD_KEY else getattr(loaded, name)
        outputs = call_with(function, jax.tree.map(tf.constant, named or inputs))
        return jax.tree.map(lambda tensor: tensor.numpy(), outputs)

    return method
