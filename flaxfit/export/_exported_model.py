"""ExportedModel: the methods and weights of a file of StableHLO."""

from collections.abc import Mapping

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from flaxfit.export._module import DEFAULT_METHOD_KEY
from flaxfit.tree import ArrayLike, Function, Json, Params, PyTree

_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
"""Kinds of numbers, from narrow to wide."""


class ExportedModel:
    """Holds the methods and the weights of a saved module, as `load` returns them.

    Calling it calls its default or only method. Neither the model's code nor Flax is needed.

    >>> import tempfile
    >>> from flaxfit import export
    >>> module = export.JaxModule({"w": np.float32(2)}, lambda p, x: x * p["w"],
    ...                           input_spec=export.InputSpec(("n",)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = export.save(module, f"{folder}/double")
    ...     double = export.load(f"{folder}/double")
    >>> double(np.float32([1, 2])), list(double.params)
    (Array([2., 4.], dtype=float32), ['w'])

    Args:
      params, programs, description: the contents of a file, as `load` reads them.
    """

    def __init__(
        self,
        params: dict[str, jax.Array],
        programs: Mapping[str, jax.export.Exported],
        description: Mapping[str, Json],
    ):
        self.params = params
        """The weights by name."""
        self.input_spec: Mapping[str, str] = description["input_spec"]
        """Descriptions of the inputs, by method."""
        self.platforms: tuple[str, ...] = tuple(description["platforms"])
        """The platforms that can run it."""
        self.versions: Mapping[str, str] = description["versions"]
        """The packages that wrote the file."""
        self._programs = dict(programs)
        self._compiled = {name: jax.jit(program.call) for name, program in programs.items()}
        self.methods: dict[str, Function] = {name: self._method(name) for name in programs}
        """The methods by name, as functions of the inputs."""

    def __call__(self, *inputs: PyTree, **named: PyTree) -> PyTree:
        """Returns the outputs of the default or only method."""
        return self.apply(self.params, *inputs, **named)

    def apply(
        self, params: Params, *inputs: PyTree, method: str | None = None, **named: PyTree
    ) -> PyTree:
        """Returns the outputs for other weights; differentiable if it was saved with gradients.

        Inputs may be arrays or nested lists of numbers. They are cast to the dtypes that the
        method takes: integers to floats, and integers of any width that fit.

        >>> double.apply({"w": np.float32(3)}, np.float32([1, 2]))
        Array([3., 6.], dtype=float32)

        Args:
          params: the weights by name.
          *inputs: the inputs of the method.
          method: its name; None: the default or only one.
          **named: the inputs of a method that takes them by keyword.

        Raises:
          TypeError: an input cannot be cast without loss, such as floats to integers.
          ValueError: the method does not exist, or takes other inputs.
        """
        names = list(self._compiled)
        if method is None:
            method = names[0] if len(names) == 1 else DEFAULT_METHOD_KEY
            if method not in names:
                raise ValueError(f"Name one of the methods: .methods has {', '.join(names)}.")
        elif method not in names:
            raise ValueError(f"There is no method {method!r}, only {', '.join(names)}.")
        return self._compiled[method](params, self._inputs(method, named or inputs))

    def __repr__(self) -> str:
        methods = ", ".join(f"{name}({spec})" for name, spec in self.input_spec.items())
        return f"ExportedModel({methods} on {', '.join(self.platforms)})"

    def _inputs(self, name: str, inputs: PyTree) -> PyTree:
        """Converts inputs to arrays of the dtypes that a method takes."""
        program = self._programs[name]
        (_, wanted), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
        try:
            pairs = jax.tree.map(lambda aval, value: (aval, value), wanted, inputs)
        except ValueError as error:
            raise ValueError(
                f"{name!r} takes {self.input_spec[name]}, got {_received(inputs)}."
            ) from error
        return jax.tree.map(lambda aval, pair: _as_input(name, aval, pair[1]), wanted, pairs)

    def _method(self, name: str) -> Function:
        def method(*inputs: PyTree, **named: PyTree) -> PyTree:
            return self.apply(self.params, *inputs, method=name, **named)

        return method


def _as_input(method: str, wanted: jax.ShapeDtypeStruct, value: ArrayLike) -> jax.Array:
    """Converts an array, or nested lists of numbers, to the wanted dtype without loss."""
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if _kind(array.dtype) > _kind(wanted.dtype):
        raise TypeError(
            f"{method!r} takes {wanted.dtype}, got {array.dtype}, which cannot be cast without "
            f"loss: pass x.astype({str(wanted.dtype)!r}) if that is intended."
        )
    # JAX assumes that symbolic dimensions are at least 1.
    if 0 in array.shape and 0 not in wanted.shape:
        raise ValueError(
            f"{method!r} takes dimensions of 1 or more, got the shape {array.shape}: there is "
            "nothing to compute."
        )
    cast = array.astype(wanted.dtype)
    are_whole = jnp.issubdtype(array.dtype, jnp.integer) and jnp.issubdtype(cast.dtype, jnp.integer)
    if are_whole and isinstance(array, np.ndarray) and not np.array_equal(cast, array):
        raise ValueError(
            f"{method!r} takes {wanted.dtype}, which cannot hold numbers from {array.min()} to "
            f"{array.max()}."
        )
    return jnp.asarray(cast)


def _kind(dtype: np.dtype) -> int:
    """Returns the index of a dtype in `_KINDS`, or the length for any other dtype."""
    places = [place for place, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)]
    return places[0] if places else len(_KINDS)


def _received(inputs: PyTree) -> str:
    def word(value: ArrayLike) -> str:
        return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else repr(value)

    return f"{jax.tree.map(word, inputs)!s:.200}"
