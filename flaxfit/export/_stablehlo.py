"""StableHLO: writes a module as one file of programs and weights, which needs only JAX."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from flaxfit.display import first_line, short_errors
from flaxfit.export import _archive
from flaxfit.export._compare import RTOL, ExportReport, write_compared
from flaxfit.export._exported_model import ExportedModel
from flaxfit.export._module import JaxModule, check_is_module
from flaxfit.export._program import PLATFORMS, PORTABLE, export_method, in_version
from flaxfit.export._spec import InputSpec, Specs
from flaxfit.tree import Function, PyTree, local_path, required


@short_errors
def save(
    module: JaxModule,
    path: str | os.PathLike[str],
    *,
    platforms: Sequence[str] = PLATFORMS,
    gradients: bool = True,
    stablehlo_version: str | None = PORTABLE,
    samples: Sequence[PyTree] | None = None,
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
      module: the module to write.
      path: the file; an existing one is replaced.
      platforms: the platforms that can run it, of "cpu", "cuda", "rocm" and "tpu".
      gradients: whether the loaded model can be differentiated (once).
      stablehlo_version: the version of the programs, by default an old one that older JAX also
        reads; None: JAX's own.
      samples: inputs to compare on, each a tuple, if random ones make no sense.
      rtol: how far an output may be off, relative to its largest value.

    Raises:
      ValueError: the file differs from the module, or the model cannot be exported; nothing is
        written.
      ImportError: flatbuffers is not installed.
    """
    check_is_module(module)
    required("StableHLO", "flatbuffers", "export")
    params = module.named_params
    programs = {}
    for name, method in module.method_specs.items():
        program = in_version(export_method(method, params, platforms), stablehlo_version)
        programs[name] = _serialized(name, program, gradients)
    description = {
        "platforms": list(platforms),
        "gradients": gradients,
        "stablehlo": stablehlo_version or "of jax",
        "versions": _versions(),
        "input_spec": {name: _words(m.input_spec) for name, m in module.method_specs.items()},
    }
    arrays = {name: np.asarray(param) for name, param in params.items()}

    def write(temporary: Path) -> Mapping[str, Function] | None:
        _archive.write(temporary, description, programs, arrays)
        return load(temporary).methods if _platform() in platforms else None

    return write_compared(module, path, "StableHLO", write, samples=samples, rtol=rtol)


@short_errors
def load(path: str | os.PathLike[str]) -> ExportedModel:
    """Reads what `save` wrote; call it, or one of its `methods`.

    Loading runs no code, and the file holds no pickle; but a program is code, and XLA does not
    defend itself against a crafted one: load only files you trust.

    >>> load("no/such/file")
    Traceback (most recent call last):
    FileNotFoundError: [Errno 2] No such file or directory: 'no/such/file'

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: `save` did not write it, it is damaged, or this JAX is too old for it.
      ImportError: flatbuffers is not installed.
    """
    required("StableHLO", "flatbuffers", "export")
    description, serialized, arrays = _archive.read(local_path(path))
    programs = {}
    try:
        for name, data in serialized.items():
            programs[name] = jax.export.deserialize(bytearray(data))
            programs[name].mlir_module()
        params = {name: jnp.array(array) for name, array in arrays.items()}
        return ExportedModel(params, programs, description)
    except Exception as error:
        raise ValueError(
            f"Cannot load {path}: jax {jax.__version__} cannot read a program of it, which jax "
            f"{description.get('versions', {}).get('jax', '?')} wrote for StableHLO "
            f"{description.get('stablehlo', '?')} ({first_line(error)})."
        ) from error


def _serialized(name: str, program: jax.export.Exported, gradients: bool) -> bytes:
    try:
        return bytes(program.serialize(vjp_order=1 if gradients else 0))
    except ValueError as error:
        if "PyTreeDef" not in str(error):
            raise
        raise ValueError(
            f"Cannot export {name!r}: its inputs and outputs must be made of dicts, lists, tuples "
            f"and arrays ({first_line(error)})."
        ) from error


def _platform() -> str:
    backend = jax.default_backend()
    if backend != "gpu":
        return backend
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"


def _words(specs: Specs) -> str:
    """Describes the inputs of a method, such as "float32[batch, 3]"."""

    def word(spec: InputSpec) -> str:
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
