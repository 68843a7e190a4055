"""TensorFlowModule: a JaxModule's methods and variables in TensorFlow, without jax2tf."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from flaxfit.export._program import PLATFORMS, PORTABLE, Method, export_method, in_version
from flaxfit.export._spec import InputSpec, Specs
from flaxfit.tree import Array, ArrayLike, Function, PyTree, required

Tensor: TypeAlias = Any
"""A `tf.Tensor` or a `tf.Variable`."""
TensorFunction: TypeAlias = Any
"""A `tf.function`."""


class TensorFlowModule:
    """The methods and variables of a JaxModule in TensorFlow.

    A method holds its StableHLO program and, for training, the program of its gradient; both take
    the variables, so assigning to these is enough.
    """

    def __init__(
        self,
        methods: Iterable[Method],
        params: Mapping[str, jax.Array],
        trainable: Mapping[str, bool],
        platforms: Sequence[str] = PLATFORMS,
        version: str = PORTABLE,
        gradients: bool = True,
    ) -> None:
        tf = import_tensorflow()
        self._is_differentiable = gradients
        self._gradients: list[Callable[[], jax.export.Exported]] = []
        self._variables = {
            name: tf.Variable(np.asarray(param), trainable=trainable[name], name=name)
            for name, param in params.items()
        }
        self.methods: dict[str, TensorFunction] = {}
        """The methods by name, as `tf.function`s of the inputs."""
        for method in methods:
            program = in_version(export_method(method, params, platforms), version)
            self.methods[method.name] = self._method(method, program)

    @property
    def variables(self) -> list[Tensor]:
        """All parameters, as `tf.Variable`s named by their paths."""
        return list(self._variables.values())

    @property
    def trainable_variables(self) -> list[Tensor]:
        """The trainable parameters."""
        return [variable for variable in self.variables if variable.trainable]

    def assign(self, params: Mapping[str, Array]) -> None:
        """Replaces the values of the variables, by name."""
        values = {name: np.asarray(param) for name, param in params.items()}
        for name, variable in self._variables.items():
            variable.assign(values[name])

    def make_gradients(self) -> None:
        """Makes the gradients of all methods; raises if one cannot be differentiated."""
        for make in self._gradients:
            make()

    def _method(self, method: Method, program: jax.export.Exported) -> TensorFunction:
        tf = import_tensorflow()
        # Lazily, as some methods have no gradient.
        gradient = functools.cache(program.vjp)
        self._gradients.append(gradient)
        run = functools.partial(_call_module, program)
        if self._is_differentiable:
            run = _with_gradient(program, gradient)

        # A function without defaults, not a lambda: TensorFlow saves its name and signature.
        def call(*inputs: PyTree, **named: PyTree) -> PyTree:
            given = _as_tensors(method.input_spec, named or inputs)
            params = {key: tf.convert_to_tensor(v) for key, v in self._variables.items()}
            outputs = run(jax.tree.leaves(((params, given), {})))
            return jax.tree.unflatten(program.out_tree, list(outputs))

        return tf.function(call, jit_compile=method.jit_compile, autograph=False)


def import_tensorflow() -> Any:
    """Imports TensorFlow, or raises an error that says how to install it."""
    return required("TensorFlow's format", "tensorflow", "tensorflow")


def tensor_specs(specs: Specs, name: str | None = None) -> PyTree:
    """Converts InputSpecs to `tf.TensorSpec`s, with None for symbolic dimensions."""
    tf = import_tensorflow()
    return jax.tree.map(
        lambda spec: tf.TensorSpec(_open(spec.shape), tf.as_dtype(spec.dtype), name=name), specs
    )


def _open(shape: Iterable[object]) -> list[int | None]:
    """Replaces symbolic dimensions by None."""
    return [d if isinstance(d, int) else None for d in shape]


def _as_tensors(specs: Specs, inputs: PyTree) -> PyTree:
    tf = import_tensorflow()
    if jax.tree.structure(inputs) != jax.tree.structure(specs):
        raise ValueError(
            "The inputs differ from input_spec.\n"
            f"Received: {jax.tree.structure(inputs)}\nExpected: {jax.tree.structure(specs)}"
        )

    def tensor(spec: InputSpec, value: ArrayLike) -> Tensor:
        return tf.convert_to_tensor(value, tf.as_dtype(spec.dtype))

    return jax.tree.map(tensor, specs, inputs)


def _with_gradient(
    exported: jax.export.Exported, gradient: Callable[[], jax.export.Exported]
) -> Function:
    """Makes a differentiable operation of a program with flat inputs."""
    tf = import_tensorflow()
    differentiable = [_is_float(aval.dtype) for aval in exported.in_avals]

    @tf.custom_gradient
    def run(*flat: Tensor) -> tuple[tuple[Tensor, ...], Function]:
        outputs = _call_module(exported, flat)

        def grad(*cotangents: Tensor) -> list[Tensor | None]:
            given = [
                cotangent if _is_float(aval.dtype) else tf.zeros(tf.shape(output), tf.bool)
                for aval, output, cotangent in zip(
                    exported.out_avals, outputs, cotangents, strict=True
                )
            ]
            found = _call_module(gradient(), [*flat, *given])
            return [g if d else None for g, d in zip(found, differentiable, strict=True)]

        return tuple(outputs), grad

    return lambda flat: run(*flat)


def _call_module(exported: jax.export.Exported, flat: Sequence[Tensor]) -> list[Tensor]:
    """Runs a StableHLO program as a TensorFlow operation."""
    tf = import_tensorflow()
    from tensorflow.compiler.tf2xla.python import xla

    # JAX's gradient of an integer has the dtype float0, which StableHLO writes as bool.
    dtypes = [bool if a.dtype == jax.dtypes.float0 else a.dtype for a in exported.out_avals]
    call_module: Function = xla.call_module
    return call_module(
        # JAX drops unused arguments from the program.
        [flat[i] for i in exported.module_kept_var_idx],
        version=exported.calling_convention_version,
        module=exported.mlir_module_serialized,
        Tout=[tf.as_dtype(dtype) for dtype in dtypes],
        Sout=[tf.TensorShape(_open(aval.shape)) for aval in exported.out_avals],
        platforms=tuple(platform.upper() for platform in exported.platforms),
        function_list=[],
        has_token_input_output=False,
        disabled_checks=(),
        use_shardy_partitioner=True,
    )


def _is_float(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)
