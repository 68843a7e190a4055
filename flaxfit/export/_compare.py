"""Writes a file, and keeps it only if it matches its source on random inputs of two sizes."""

import contextlib
import dataclasses
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from flaxfit.display import say, size
from flaxfit.export._module import JaxModule
from flaxfit.export._spec import Specs, as_arguments, call_with, random_inputs, two_sizes
from flaxfit.tree import Array, Function, PyTree, flat, local_path

RTOL = 1e-4


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """The written file, and its measured error when read back.

    >>> print(ExportReport(Path("digits.ff"), "StableHLO", 23_000, 1.2e-7, ("batch=1", "batch=5")))
    digits.ff: StableHLO, 23.0 kB, at most 1.2e-07 off its source on batch=1; batch=5

    Args:
      path: the file or folder.
      format: "StableHLO", "SavedModel" or "ONNX".
      n_bytes: its size.
      max_error: the largest difference of an output, relative to the largest value of that output.
      inputs: the inputs that were compared on; none if the file does not run on this machine.
    """

    path: Path
    format: str
    n_bytes: int
    max_error: float
    inputs: tuple[str, ...]

    def __str__(self) -> str:
        off = f"at most {self.max_error:.1e} off" if self.max_error else "equal to"
        measured = (
            f"{off} its source on {'; '.join(self.inputs)}" if self.inputs else "not compared"
        )
        return f"{self.path}: {self.format}, {size(self.n_bytes)}, {measured}"


def write_compared(
    module: JaxModule,
    path: str | os.PathLike[str],
    form: str,
    write: Callable[[Path], Mapping[str, Function] | None],
    *,
    samples: Sequence[PyTree] | None,
    rtol: float,
    folder: bool = False,
) -> ExportReport:
    """Writes a file or folder, and keeps it only if its methods match the module's.

    `write` writes to a path, reads it back and returns its methods by name; None if they do not run
    on this machine. `samples` are inputs instead of random ones, each a tuple (or a dict of
    keywords); `rtol` is relative to the largest value of an output.
    """
    path = local_path(path)
    error, inputs = math.nan, {}
    with _replacing(path, folder=folder) as temporary:
        methods = write(temporary)
        if methods is not None:
            error = 0.0
        for name, method in (methods or {}).items():
            source = module.jax_methods[name]
            for words, given in _inputs(name, module.method_specs[name].input_spec, samples):
                inputs[words] = None
                want, got = flat(call_with(source, given)), flat(call_with(method, given))
                error = max(error, _largest_difference(name, words, got, want, rtol))
    files = path.rglob("*") if folder else [path]
    n_bytes = sum(file.stat().st_size for file in files if file.is_file())
    report = ExportReport(path, form, n_bytes, error, tuple(inputs))
    say(f"exported {report}")
    return report


def _largest_difference(
    name: str, inputs: str, got: Mapping[str, Array], want: Mapping[str, Array], rtol: float
) -> float:
    """Returns the largest difference between outputs; raises if it exceeds the tolerance."""
    largest = 0.0
    for path, value in want.items():
        error = difference(got.get(path), value)
        if not error <= _tolerance(value, rtol):
            where = f"output {path!r} of {name!r}" if path else f"the output of {name!r}"
            raise ValueError(
                f"Nothing was written: when read back, {where} differs from its source by "
                f"{error:.1e} on {inputs}, more than rtol={rtol:g} allows."
            )
        largest = max(largest, error)
    return largest


def difference(got: Array | None, want: Array) -> float:
    """Returns `max |got - want| / max |want|`; for integers the fraction that differs.

    >>> difference(np.array([1.0, 2.5]), np.array([1.0, 2.0]))
    0.25
    >>> difference(np.array([1, 2]), np.array([1, 3]))
    0.5
    """
    if got is None:
        return np.inf
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        return np.inf
    if not want.size:
        return 0.0
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        return float(np.mean(got != want))
    wide = np.complex128 if jnp.issubdtype(want.dtype, jnp.complexfloating) else np.float64
    got, want = got.astype(wide), want.astype(wide)
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        return np.inf
    if not finite.any():
        return 0.0
    scale = max(np.abs(want[finite]).max(), np.finfo(np.float32).tiny)
    error = np.abs(got[finite] - want[finite]).max() / scale
    return float(error) if np.isfinite(error) else np.inf


def _inputs(
    name: str, specs: Specs, samples: Sequence[PyTree] | None
) -> Iterator[tuple[str, PyTree]]:
    """Yields descriptions and inputs to compare a method on."""
    if samples is not None:
        for i, sample in enumerate(samples):
            yield f"sample {i}", as_arguments(sample)
        return
    sizes = two_sizes(specs)
    if not sizes:
        raise ValueError(
            f"Cannot find sizes that meet the constraints of {name!r} to compare what is written "
            "with its source: pass samples=, a list of tuples of inputs."
        )
    for chosen in sizes:
        words = ", ".join(f"{symbol}={n}" for symbol, n in chosen.items())
        yield words or "random inputs", random_inputs(specs, chosen)


def _tolerance(value: Array, rtol: float) -> float:
    """Returns the tolerance of a value: `rtol`, but at least two roundings of its dtype."""
    dtype = np.asarray(value).dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        return rtol
    return max(rtol, 2 * float(jnp.finfo(dtype).eps))


@contextlib.contextmanager
def _replacing(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """Yields a temporary path, which replaces `path` unless the block raises.

    Raises:
      FileExistsError: `path` is a folder instead of a file, or a folder of anything but a
        SavedModel.
    """
    path = Path(os.path.abspath(path))
    if folder and path.exists():
        is_empty = path.is_dir() and not any(path.iterdir())
        if not is_empty and not (path / "saved_model.pb").is_file():
            raise FileExistsError(
                f"Cannot write a SavedModel to {path}: it holds something else. Name a new folder."
            )
    elif path.is_dir():
        raise FileExistsError(f"Cannot write the file {path}: it is a folder. Name a file in it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing-{os.getpid()}")
    old = path.with_name(f".{path.name}.replaced-{os.getpid()}")
    try:
        yield temporary
        # Sync before the rename: else a power cut could leave `path` with incomplete content.
        for file in temporary.rglob("*") if folder else [temporary]:
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        if folder and path.exists():
            path.rename(old)  # A folder cannot be renamed onto a folder that is not empty.
        os.replace(temporary, path)
    finally:
        for left in (temporary, old):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
