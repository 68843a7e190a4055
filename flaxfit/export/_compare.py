"""Compares what was written with its source, on random inputs of two sizes."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from flaxfit.display import say
from flaxfit.export._spec import random_inputs, two_sizes
from flaxfit.tree._paths import flat
from flaxfit.tree._types import Function, PyTree

RTOL = 1e-4


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """What was written, and how far off its source it was when it was read again.

    >>> print(ExportReport(Path("digits.ff"), "StableHLO", 23_000, 1.2e-7, ("batch=1", "batch=5")))
    digits.ff: StableHLO, 23 kB, at most 1.2e-07 off its source on batch=1; batch=5
    """

    path: Path
    """The file or folder."""
    format: str
    """Its format."""
    n_bytes: int
    """Its size."""
    max_error: float
    """The largest difference of an output, relative to the largest value of that output."""
    inputs: tuple[str, ...]
    """The inputs that were compared on; none, where the file does not run on this machine."""

    def __str__(self) -> str:
        off = f"at most {self.max_error:.1e} off" if self.max_error else "equal to"
        measured = (
            f"{off} its source on {'; '.join(self.inputs)}" if self.inputs else "not compared"
        )
        return f"{self.path}: {self.format}, {_size(self.n_bytes)}, {measured}"


def compare(
    want: dict[str, Function],
    got: dict[str, Function],
    specs: dict[str, Any],
    *,
    samples: Sequence[Any] | None,
    rtol: float,
) -> tuple[float, tuple[str, ...]]:
    """The largest difference between functions of the same names, and what it was measured on.

    Args:
      want: the source.
      got: what was read from the file.
      specs: the inputs of each.
      samples: inputs to use in place of random ones, each a tuple (or a dict of keywords).
      rtol: how large a difference may be.

    Raises:
      ValueError: an output differs by more.
    """
    largest, seen = 0.0, {}
    for name, function in got.items():
        for described, inputs in _inputs(name, specs[name], samples):
            seen[described] = None
            expected = flat(_call(want[name], inputs))
            found = flat(_call(function, inputs))
            for path, value in expected.items():
                error = difference(found.get(path), value)
                where = f"output {path!r} of {name!r}" if path else f"the output of {name!r}"
                if not error <= _tolerance(value, rtol):
                    raise ValueError(
                        f"Nothing was written: read again, {where} is {error:.1e} off its source "
                        f"on {described}, more than rtol={rtol:g} allows."
                    )
                largest = max(largest, error)
    return largest, tuple(seen)


def difference(got: Any, want: Any) -> float:
    """How far one array is off another: relative to its largest value; of integers, the share.

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


def report(path: Path, form: str, n_bytes: int, compared: tuple[float, Any]) -> ExportReport:
    """The report of what was written; says it as well."""
    made = ExportReport(path, form, n_bytes, *compared)
    say(f"exported {made}")
    return made


def size_of(path: Path) -> int:
    """The bytes of a file, or of the files of a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _inputs(name: str, specs: PyTree, samples: Sequence[Any] | None) -> list[tuple[str, Any]]:
    if samples is not None:
        return [
            (f"sample {i}", s if isinstance(s, tuple | dict) else (s,))
            for i, s in enumerate(samples)
        ]
    sizes = two_sizes(specs)
    if not sizes:
        raise ValueError(
            f"Cannot find sizes that meet the constraints of {name!r} to compare what is written "
            "with its source: pass samples=, a list of tuples of inputs."
        )
    return [
        (
            ", ".join(f"{symbol}={size}" for symbol, size in chosen.items()) or "random inputs",
            random_inputs(specs, chosen),
        )
        for chosen in sizes
    ]


def _call(function: Function, inputs: PyTree) -> Any:
    return function(**inputs) if isinstance(inputs, dict) else function(*inputs)


def _tolerance(value: Any, rtol: float) -> float:
    """The tolerance for a value: two roundings, where its dtype is coarser than the tolerance."""
    dtype = np.asarray(value).dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        return rtol
    return max(rtol, 2 * float(jnp.finfo(dtype).eps))


def _size(n_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.3g} {unit}"
    return f"{n_bytes} bytes"
