"""The file of `export.save`: a ZIP archive of a description, programs and weights; no pickle."""

import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

FORMAT = "flaxfit-stablehlo"
VERSION = 1
_DESCRIPTION, _WEIGHTS = "description.json", "weights"


def write(
    path: Path,
    description: Mapping[str, Any],
    programs: Mapping[str, bytes],
    arrays: Mapping[str, np.ndarray],
) -> None:
    """Writes programs and arrays by name; nothing is compressed, so that sizes tell the truth."""
    described = [
        {"name": name, "dtype": str(array.dtype), "shape": list(array.shape)}
        for name, array in arrays.items()
    ]
    record = {
        "format": FORMAT,
        "version": VERSION,
        **description,
        "programs": list(programs),
        "arrays": described,
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_DESCRIPTION, json.dumps(record, indent=1))
        for i, program in enumerate(programs.values()):
            archive.writestr(f"programs/{i}", program)
        with archive.open(_WEIGHTS, "w", force_zip64=True) as weights:
            for array in arrays.values():
                weights.write(array.tobytes())


def read(path: Path) -> tuple[dict[str, Any], dict[str, bytes], dict[str, np.ndarray]]:
    """The description, the programs and the arrays of a file, as far as its size is believable.

    Raises:
      FileNotFoundError: there is no file.
      ValueError: it is none of ours, of a later version, or damaged.
    """
    try:
        return _read(path)
    except (OSError, MemoryError):
        raise
    except _Later as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(
            f"Cannot load {path}: it was not written by flaxfit.export.save, or it is damaged "
            f"({reason})."
        ) from error


class _Later(Exception):
    """The file is of a version that this one does not know."""


def _read(path: Path) -> tuple[dict[str, Any], dict[str, bytes], dict[str, np.ndarray]]:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        # What is stored as it is cannot grow when it is read.
        if any(m.compress_type != zipfile.ZIP_STORED or m.flag_bits & 1 for m in members):
            raise ValueError("a part of it is compressed or encrypted")
        if sum(m.file_size for m in members) > path.stat().st_size:
            raise ValueError("its parts are larger than the file")
        record = json.loads(archive.read(_DESCRIPTION))
        if record["format"] != FORMAT:
            raise ValueError(f"its format is {record['format']!r:.40}")
        if record["version"] > VERSION:
            raise _Later(
                f"Cannot load {path}: it has version {record['version']} of the format, this "
                f"flaxfit reads up to {VERSION}. Install a newer flaxfit."
            )
        names = record["programs"]
        programs = {name: archive.read(f"programs/{i}") for i, name in enumerate(names)}
        return record, programs, _arrays(record["arrays"], archive.read(_WEIGHTS))


def _arrays(described: list[Any], weights: bytes) -> dict[str, np.ndarray]:
    arrays, start = {}, 0
    for entry in described:
        name, shape, dtype = entry["name"], tuple(entry["shape"]), jnp.dtype(entry["dtype"])
        if (
            str(dtype) != entry["dtype"]
            or dtype.hasobject
            or dtype.fields
            or min(shape, default=1) < 0
        ):
            raise ValueError(f"{name!r:.60} is no array of numbers")
        size = math.prod(shape)
        if start + size * dtype.itemsize > len(weights):
            raise ValueError(f"the weights end before {name!r:.60}")
        arrays[name] = np.frombuffer(weights, dtype, size, start).reshape(shape)
        start += size * dtype.itemsize
    if start != len(weights):
        raise ValueError("there are more weights than it describes")
    return arrays
