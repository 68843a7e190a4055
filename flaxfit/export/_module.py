"""JaxModule: parameters and named functions of them, the input of every export format."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax.core import FrozenDict

from flaxfit.data._batch import call
from flaxfit.export._program import Method
from flaxfit.export._spec import Specs, as_arguments, as_specs, call_with, shape_structs
from flaxfit.export._tensorflow import TensorFlowModule
from flaxfit.tree import Function, Params, PyTree, flat, is_key, single_replica_of_any_axis

DEFAULT_METHOD_KEY = "jax_module_default_method"


class JaxModule:
    """Combines parameters and functions of them for export.

    The parameters are copied; `update_variables` replaces them, in all formats at once.

    >>> import numpy as np
    >>> from flaxfit.export import InputSpec
    >>> module = JaxModule({"w": np.ones(3)}, lambda p, x: x @ p["w"],
    ...                    input_spec=InputSpec(("batch", 3)))
    >>> float(module.jax_methods[JaxModule.DEFAULT_METHOD_KEY](np.ones((1, 3)))[0])
    3.0

    Args:
      params: a pytree of arrays, such as a model's variables.
      apply_fn: `(params, *inputs) -> outputs`, or several by name; in evaluation mode.
      input_spec: one `InputSpec`, a tuple of (nested) specs, or a dict of specs that are passed
        by keyword; by the name of the method if there are several.
      trainable: whether TensorFlow may train the parameters; a bool, or a pytree of bools like
        `params`.
      jit_compile: whether TensorFlow compiles a method as a whole; by name if they differ.
      preprocess: `(*inputs) -> inputs` before the function, exported with it; the specs are those
        of its inputs.
      postprocess: `outputs -> outputs` after it.

    Raises:
      ValueError: the names of methods differ, or two parameters have one name.
      TypeError: something is neither an array nor an InputSpec nor a function.
    """

    DEFAULT_METHOD_KEY = DEFAULT_METHOD_KEY
    """The name of the method if `apply_fn` is a single function."""

    def __init__(
        self,
        params: Params,
        apply_fn: Function | Mapping[str, Function],
        *,
        input_spec: Specs | Mapping[str, Specs],
        trainable: bool | PyTree = False,
        jit_compile: bool | Mapping[str, bool] = True,
        preprocess: Function | None = None,
        postprocess: Function | None = None,
    ):
        self._structure = jax.tree.structure(params)
        self._leaves = named_arrays(params)
        self.trainable: dict[str, bool] = self._flags(trainable)
        """Whether a parameter is trainable, by its name."""
        functions = apply_fn
        if not isinstance(functions, Mapping):
            functions = {DEFAULT_METHOD_KEY: functions}
            input_spec = {DEFAULT_METHOD_KEY: input_spec}
        specs = _by_method("input_spec", input_spec, functions)
        compiled = _by_method("jit_compile", jit_compile, functions)
        self.method_specs: dict[str, Method] = {}
        """The methods by name, with their inputs."""
        for name, function in functions.items():
            if not callable(function):
                raise TypeError(f"Method {name!r} must be a function, got {function!r:.60}.")
            spec = as_arguments(as_specs(specs[name]))
            shape_structs(spec)  # Raise JAX's errors here rather than during export.
            run = self._method(function, preprocess, postprocess)
            self.method_specs[name] = Method(name, run, spec, bool(compiled[name]))
        self._compiled = {name: jax.jit(m.function) for name, m in self.method_specs.items()}
        self._tensorflow: TensorFlowModule | None = None

    @property
    def params(self) -> Params:
        """The current parameters."""
        return jax.tree.unflatten(self._structure, list(self._leaves.values()))

    @property
    def named_params(self) -> dict[str, jax.Array]:
        """The current parameters by name: the "."-joined path, with "_" for "~"."""
        return dict(self._leaves)

    @property
    def with_gradient(self) -> bool:
        """Whether some parameter is trainable."""
        return any(self.trainable.values())

    @property
    def jax_methods(self) -> dict[str, Function]:
        """The methods as compiled functions of the inputs, in JAX."""
        return {name: functools.partial(self._call, name) for name in self.method_specs}

    @property
    def methods(self) -> dict[str, Function]:
        """The methods as functions of the inputs, in TensorFlow."""
        return self.tensorflow.methods

    @property
    def tensorflow(self) -> TensorFlowModule:
        """The module in TensorFlow: its `methods`, `variables` and `trainable_variables`.

        Raises:
          ImportError: TensorFlow is not installed.
        """
        if self._tensorflow is None:
            self._tensorflow = TensorFlowModule(
                self.method_specs.values(), self._leaves, self.trainable
            )
        return self._tensorflow

    def update_variables(self, params: Params) -> None:
        """Replaces all parameters, in JAX and in TensorFlow, or none.

        >>> module.update_variables({"w": np.zeros(3)})
        >>> module.params
        {'w': Array([0., 0., 0.], dtype=float32)}

        Args:
          params: a pytree like the current one, of the same shapes and dtypes.

        Raises:
          ValueError: it differs; every difference is listed, and nothing has changed.
        """
        if jax.tree.structure(params) != self._structure:
            raise ValueError(
                "Cannot update the variables: the PyTree structure of the updated parameters must "
                f"be the same.\nReceived: {jax.tree.structure(params)}\n"
                f"Expected: {self._structure}"
            )
        leaves = named_arrays(params)
        wrong = [
            f"{name} is {old.dtype}{list(old.shape)}, got {new.dtype}{list(new.shape)}"
            for (name, old), new in zip(self._leaves.items(), leaves.values(), strict=True)
            if (old.shape, old.dtype) != (new.shape, new.dtype)
        ]
        if wrong:
            raise ValueError(
                "Cannot update the variables, their shapes or dtypes differ: " + "; ".join(wrong)
            )
        if self._tensorflow is not None:
            self._tensorflow.assign(leaves)
        self._leaves = leaves

    def _call(self, method: str, /, *inputs: PyTree, **named: PyTree) -> PyTree:
        return self._compiled[method](self._leaves, named or inputs)

    def _method(
        self, function: Function, preprocess: Function | None, postprocess: Function | None
    ) -> Function:
        def run(leaves: Mapping[str, PyTree], inputs: PyTree) -> PyTree:
            if preprocess is not None:
                inputs = as_arguments(call_with(preprocess, inputs))
            # Use our order of the names: `jit` sorts dicts.
            params = jax.tree.unflatten(self._structure, [leaves[name] for name in self._leaves])
            outputs = call(single_replica_of_any_axis(function), params, inputs)
            return plain(outputs if postprocess is None else postprocess(outputs))

        return run

    def _flags(self, trainable: bool | PyTree) -> dict[str, bool]:
        if isinstance(trainable, bool):
            return dict.fromkeys(self._leaves, trainable)
        if jax.tree.structure(trainable) != self._structure:
            raise ValueError(
                "trainable must be a bool or a pytree of bools with the structure of params.\n"
                f"Received: {jax.tree.structure(trainable)}\nExpected: {self._structure}"
            )
        return dict(zip(self._leaves, map(bool, jax.tree.leaves(trainable)), strict=True))


def check_is_module(given: object) -> None:
    """Checks that `given` is a JaxModule."""
    if not isinstance(given, JaxModule):
        raise TypeError(
            f"Pass a JaxModule, got {type(given).__name__}. A Model writes itself, "
            "model.export(path); flaxfit.export.from_state makes a JaxModule of a state."
        )


def named_arrays(params: Params) -> dict[str, jax.Array]:
    """Copies the leaves to the default device, by name."""
    arrays: dict[str, jax.Array] = {}
    for path, leaf in flat(params).items():
        name = path.replace("/", ".").replace("~", "_") or "params"
        if name in arrays:
            raise ValueError(f"Two parameters would both be named {name!r}: rename one of them.")
        if is_key(leaf):
            raise TypeError(f"Parameter {name!r} is a random key, which no format can hold.")
        arrays[name] = jnp.array(jax.device_get(leaf))
    return arrays


def plain(tree: PyTree) -> PyTree:
    """Converts a tree to containers that every format knows: dicts, lists and tuples.

    Named tuples and dataclasses become dicts of their fields.
    """
    if isinstance(tree, dict | FrozenDict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and (fields := getattr(tree, "_fields", None)):
        return {key: plain(value) for key, value in zip(fields, tree, strict=True)}
    if isinstance(tree, list | tuple):
        return type(tree)(map(plain, tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {f.name: plain(getattr(tree, f.name)) for f in dataclasses.fields(tree)}
    return tree


def _by_method(
    argument: str, given: PyTree, functions: Mapping[str, Function]
) -> Mapping[str, PyTree]:
    """Returns an argument by method; a single value is for all methods."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(functions, given)
    if given.keys() != functions.keys():
        raise ValueError(
            f"{argument} must have the same keys as apply_fn.\n"
            f"Received: {sorted(given)}\nExpected: {sorted(functions)}"
        )
    return given
