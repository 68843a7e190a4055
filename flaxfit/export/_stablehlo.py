"""StableHLO: a module as one file of programs and weights that JAX alone can run."""

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from flaxfit.export import _archive
from flaxfit.export._compare import RTOL, ExportReport, compare, report, size_of
from flaxfit.export._files import replacing
from flaxfit.export._input import as_input
from flaxfit.export._module import DEFAULT_METHOD_KEY, JaxModule
from flaxfit.export._program import PLATFORMS, PORTABLE, export_method, in_version
from flaxfit.tree._checks import local_path
from flaxfit.tree._types import Function, Params, PyTree


class ExportedModel:
    """What `load` gives: the methods of the module that was saved, and its weights.

    Calling it calls its default or only method. Neither the model's code nor flax is needed.

    >>> import tempfile
    >>> from flaxfit import export
    >>> module = export.JaxModule({"w": np.float32(2)}, lambda p, x: x * p["w"],
    ...                           input_spec=export.InputSpec(("n",)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = export.save(module, f"{folder}/double")
    ...     double = export.load(f"{folder}/double")
    >>> double(np.float32([1, 2])), list(double.params)
    (Array([2., 4.], dtype=float32), ['w'])
    """

    def __init__(
        self,
        params: dict[str, jax.Array],
        programs: Mapping[str, jax.export.Exported],
        description: Mapping[str, Any],
    ):
        self.params = params
        """The weights by name."""
        self.input_spec: Mapping[str, str] = description["input_spec"]
        """What the methods take, in words."""
        self.platforms: tuple[str, ...] = tuple(description["platforms"])
        """Where it runs."""
        self.versions: Mapping[str, str] = description["versions"]
        """The packages that wrote the file."""
        self.methods: dict[str, Function] = {}
        """The methods by name, as functions of the inputs."""
        self._programs = dict(programs)
        self._compiled = {name: jax.jit(program.call) for name, program in programs.items()}
        for name in programs:
            self.methods[name] = self._method(name)

    def __call__(self, *inputs: PyTree, **named: Any) -> Any:
        """The outputs of the default or only method."""
        return self.apply(self.params, *inputs, **named)

    def apply(
        self, params: Params, *inputs: PyTree, method: str | None = None, **named: Any
    ) -> Any:
        """The outputs for other weights; can be differentiated if it was saved with gradients.

        Inputs may be arrays or nested lists of numbers. They are cast to the dtypes that the
        method takes: whole numbers to real ones, and whole numbers of any width that fit.

        Args:
          params: the weights by name.
          *inputs: what the method takes.
          method: its name; None: the default or only one.
          **named: the inputs of a method that takes them by keyword.

        Raises:
          TypeError: real numbers where the method takes whole ones, or the like.
          ValueError: there is no such method; the inputs are not what it takes.
        """
        name = self._default if method is None else method
        if name not in self._compiled:
            raise ValueError(f"There is no method {name!r}, only {', '.join(self._compiled)}.")
        return self._compiled[name](params, self._inputs(name, named or inputs))

    def __repr__(self) -> str:
        methods = ", ".join(f"{name}({spec})" for name, spec in self.input_spec.items())
        return f"ExportedModel({methods} on {', '.join(self.platforms)})"

    @property
    def _default(self) -> str:
        if DEFAULT_METHOD_KEY in self._compiled:
            return DEFAULT_METHOD_KEY
        if len(self._compiled) == 1:
            return next(iter(self._compiled))
        raise ValueError(f"Name one of the methods: .methods has {', '.join(self._compiled)}.")

    def _inputs(self, name: str, inputs: PyTree) -> Any:
        """The inputs as arrays of the dtypes that a method takes."""
        program = self._programs[name]
        (_, wanted), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
        try:
            pairs = jax.tree.map(lambda aval, value: (aval, value), wanted, inputs)
        except ValueError as error:
            raise ValueError(
                f"{name!r} takes {self.input_spec[name]}, got {_received(inputs)}."
            ) from error
        return jax.tree.map(lambda aval, pair: as_input(name, aval, pair[1]), wanted, pairs)

    def _method(self, name: str) -> Function:
        def method(*inputs: PyTree, **named: Any) -> Any:
            return self.apply(self.params, *inputs, method=name, **named)

        return method


def save(
    module: JaxModule,
    path: str | os.PathLike[str],
    *,
    platforms: Sequence[str] = PLATFORMS,
    gradients: bool = True,
    stablehlo_version: str | None = PORTABLE,
    samples: Sequence[Any] | None = None,
    rtol: float = RTOL,
) -> ExportReport:
    """Writes a module as StableHLO: one file that `load` runs, on several platforms.

    The file is read again and compared with the module before it takes its place.

    >>> import tempfile
    >>> from flaxfit.export import InputSpec
    >>> module = JaxModule({}, lambda p, x: x + 1, input_spec=InputSpec(("n", 2)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(module, f"{folder}/plus_one").max_error
    0.0

    Args:
      module: what to write.
      path: the file; one that is there is replaced.
      platforms: where it is to run, of "cpu", "cuda", "rocm" and "tpu".
      gradients: whether what is loaded can be differentiated (once).
      stablehlo_version: of the programs, an old one by default so that older JAX reads them too;
        None: JAX's own.
      samples: inputs to compare on, each a tuple, where random ones make no sense.
      rtol: how far an output may be off, relative to its largest value.

    Raises:
      ValueError: the file differs from the module, or the model cannot be exported; nothing is
        written.
      ImportError: flatbuffers is not installed.
    """
    _check_flatbuffers()
    programs = {}
    for name in module.method_specs:
        program = in_version(export_method(module, name, platforms), stablehlo_version)
        programs[name] = _serialized(name, program, gradients)
    description = {
        "platforms": list(platforms),
        "gradients": gradients,
        "stablehlo": stablehlo_version or "of jax",
        "versions": _versions(),
        "input_spec": {name: _words(m.input_spec) for name, m in module.method_specs.items()},
    }
    arrays = {name: np.asarray(leaf) for name, leaf in module.named_params.items()}
    specs = {name: method.input_spec for name, method in module.method_specs.items()}
    with replacing(path) as temporary:
        _archive.write(temporary, description, programs, arrays)
        compared = (math.nan, ())
        if _platform() in platforms:
            methods = load(temporary).methods
            compared = compare(module.jax_methods, methods, specs, samples=samples, rtol=rtol)
    return report(Path(path), "StableHLO", size_of(Path(path)), compared)


def load(path: str | os.PathLike[str]) -> ExportedModel:
    """Reads what `save` wrote; call it, or one of its `methods`.

    Reading runs nothing, and there is no pickle in the file; but a program is code, and XLA does
    not defend itself against a crafted one: load files of people you trust.

    >>> load("no/such/file")
    Traceback (most recent call last):
    FileNotFoundError: [Errno 2] No such file or directory: 'no/such/file'

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: `save` did not write it, it is damaged, or this JAX is too old for it.
      ImportError: flatbuffers is not installed.
    """
    _check_flatbuffers()
    description, serialized, arrays = _archive.read(local_path(path))
    programs = {}
    try:
        for name, data in serialized.items():
            programs[name] = jax.export.deserialize(bytearray(data))
            programs[name].mlir_module()
        params = {name: jnp.array(array) for name, array in arrays.items()}
        return ExportedModel(params, programs, description)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(
            f"Cannot load {path}: jax {jax.__version__} cannot read a program of it, which jax "
            f"{description.get('versions', {}).get('jax', '?')} wrote for StableHLO "
            f"{description.get('stablehlo', '?')} ({reason})."
        ) from error


def _check_flatbuffers() -> None:
    if find_spec("flatbuffers") is None:
        raise ImportError(
            "Writing and reading StableHLO needs flatbuffers: pip install 'flaxfit[export]'."
        )


def _serialized(name: str, program: jax.export.Exported, gradients: bool) -> bytes:
    try:
        return bytes(program.serialize(vjp_order=1 if gradients else 0))
    except ValueError as error:
        if "PyTreeDef" not in str(error):
            raise
        raise ValueError(
            f"Cannot export {name!r}: its inputs and outputs must be made of dicts, lists, tuples "
            f"and arrays ({str(error).splitlines()[0][:200]})."
        ) from error


def _platform() -> str:
    """The platform of this process, as `jax.export` names it."""
    backend = jax.default_backend()
    if backend != "gpu":
        return backend
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"


def _received(inputs: PyTree) -> str:
    def word(value: Any) -> str:
        return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else repr(value)

    return f"{jax.tree.map(word, inputs)!s:.200}"


def _words(specs: PyTree) -> str:
    def word(spec: PyTree) -> str:
        return f"{spec.dtype}[{', '.join(map(str, spec.shape))}]"

    if isinstance(specs, dict):
        return ", ".join(f"{name}: {jax.tree.map(word, spec)}" for name, spec in specs.items())
    return ", ".join(str(jax.tree.map(word, spec)) for spec in specs)


def _versions() -> dict[str, str]:
    versions = {}
    for package in ("jax", "jaxlib", "flax", "flaxfit"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
