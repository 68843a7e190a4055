"""TensorFlowModule: a JaxModule's methods and variables in TensorFlow, without jax2tf."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import numpy as np

from flaxfit.export._program import PLATFORMS, PORTABLE, export_method, in_version
from flaxfit.tree._types import Function, PyTree


class TensorFlowModule:
    """The methods and variables of a JaxModule in TensorFlow.

    A method holds its StableHLO program and, for training, the program of its gradient; both take
    the variables, so that assigning to these is enough.
    """

    def __init__(
        self,
        module: Any,
        platforms: Sequence[str] = PLATFORMS,
        version: str = PORTABLE,
        gradients: bool = True,
    ) -> None:
        tf = import_tensorflow()
        self._platforms, self._version = platforms, version
        self._is_differentiable = gradients
        self._gradients: dict[str, Callable[[], jax.export.Exported]] = {}
        self._variables = {
            name: tf.Variable(np.asarray(leaf), trainable=module.trainable[name], name=name)
            for name, leaf in module.named_params.items()
        }
        self.methods: dict[str, Any] = {
            name: self._method(module, name) for name in module.method_specs
        }
        """The methods by name, as `tf.function`s of the inputs."""

    @property
    def variables(self) -> list[Any]:
        """All parameters, as `tf.Variable`s named by their paths."""
        return list(self._variables.values())

    @property
    def trainable_variables(self) -> list[Any]:
        """The trainable ones."""
        return [variable for variable in self.variables if variable.trainable]

    def assign(self, leaves: dict[str, PyTree]) -> None:
        """Takes over other values, by name."""
        values = {name: np.asarray(leaf) for name, leaf in leaves.items()}
        for name, variable in self._variables.items():
            variable.assign(values[name])

    def make_gradients(self) -> None:
        """Makes the gradients of all methods.

        Raises:
          ValueError: a method cannot be differentiated.
        """
        for make in self._gradients.values():
            make()

    def _method(self, module: Any, name: str) -> Function:
        tf = import_tensorflow()
        method = module.method_specs[name]
        exported = export_method(module, name, self._platforms)
        program = in_version(exported, self._version)
        # Made when it is asked for: there are methods without one.
        self._gradients[name] = functools.cache(program.vjp)
        run = functools.partial(_call_module, program)
        if self._is_differentiable:
            run = _with_gradient(program, self._gradients[name])

        # Not a lambda, and without defaults: TensorFlow saves the name and the signature.
        def call(*inputs: PyTree, **named: Any) -> Any:
            given = _as_tensors(method.input_spec, named or inputs)
            params = {key: tf.convert_to_tensor(v) for key, v in self._variables.items()}
            outputs = run(jax.tree.leaves(((params, given), {})))
            return jax.tree.unflatten(program.out_tree, list(outputs))

        return tf.function(call, jit_compile=method.jit_compile, autograph=False)


def import_tensorflow() -> Any:
    """TensorFlow, or an error that says how to install it."""
    try:
        import tensorflow
    except ImportError as error:
        raise ImportError(
            "TensorFlow's formats need TensorFlow: pip install 'flaxfit[tensorflow]'."
        ) from error
    return tensorflow


def tensor_specs(specs: PyTree, name: str | None = None) -> Any:
    """InputSpecs as `tf.TensorSpec`s, whose symbolic dimensions are open."""
    tf = import_tensorflow()

    def tensor(spec: PyTree) -> Any:
        shape = [d if isinstance(d, int) else None for d in spec.shape]
        return tf.TensorSpec(shape, tf.as_dtype(spec.dtype), name=name)

    return jax.tree.map(tensor, specs)


def _as_tensors(specs: PyTree, inputs: PyTree) -> Any:
    """The inputs as tensors of the dtypes of their specs."""
    tf = import_tensorflow()
    if jax.tree.structure(inputs) != jax.tree.structure(specs):
        raise ValueError(
            "The inputs differ from input_spec.\n"
            f"Received: {jax.tree.structure(inputs)}\nExpected: {jax.tree.structure(specs)}"
        )

    def tensor(spec: PyTree, value: Any) -> Any:
        return tf.convert_to_tensor(value, tf.as_dtype(spec.dtype))

    return jax.tree.map(tensor, specs, inputs)


def _with_gradient(
    exported: jax.export.Exported, gradient: Callable[[], jax.export.Exported]
) -> Function:
    """A program of flat inputs as an operation that can be differentiated."""
    tf = import_tensorflow()
    differentiable = [_is_float(aval) for aval in exported.in_avals]

    @tf.custom_gradient
    def run(*flat: Any) -> Any:
        outputs = _call_module(exported, flat)

        def grad(*cotangents: Any) -> Any:
            given = [
                cotangent if _is_float(aval) else tf.zeros(tf.shape(output), tf.bool)
                for aval, output, cotangent in zip(
                    exported.out_avals, outputs, cotangents, strict=True
                )
            ]
            found = _call_module(gradient(), [*flat, *given])
            return [g if d else None for g, d in zip(found, differentiable, strict=True)]

        return tuple(outputs), grad

    return lambda flat: run(*flat)


def _call_module(exported: jax.export.Exported, flat: Sequence[Any]) -> Any:
    """TensorFlow's operation that runs a program of StableHLO."""
    tf = import_tensorflow()
    from tensorflow.compiler.tf2xla.python import xla

    return xla.call_module(
        # Arguments that the program does not use are no part of it.
        [flat[i] for i in exported.module_kept_var_idx],
        version=exported.calling_convention_version,
        module=exported.mlir_module_serialized,
        # The gradient of an integer is of a type without values, which StableHLO writes as bool.
        Tout=[
            tf.as_dtype(bool if aval.dtype == jax.dtypes.float0 else aval.dtype)
            for aval in exported.out_avals
        ],
        Sout=[
            tf.TensorShape([d if isinstance(d, int) else None for d in aval.shape])
            for aval in exported.out_avals
        ],
        platforms=tuple(platform.upper() for platform in exported.platforms),
        function_list=[],
        has_token_input_output=False,
        disabled_checks=(),
        use_shardy_partitioner=True,
    )


def _is_float(aval: Any) -> bool:
    return jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact)
