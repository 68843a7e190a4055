"""The file of `export.save`: a ZIP archive of a description, programs and weights; no pickle."""

import json
import math
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from flaxfit.display import first_line
from flaxfit.tree import Json

FORMAT = "flaxfit-stablehlo"
VERSION = 1
_DESCRIPTION, _WEIGHTS = "description.json", "weights"


def write(
    path: Path,
    description: Mapping[str, Json],
    programs: Mapping[str, bytes],
    arrays: Mapping[str, np.ndarray],
) -> None:
    """Writes programs and arrays by name, uncompressed, so that no part is larger than it says."""
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


def read(path: Path) -> tuple[dict[str, Json], dict[str, bytes], dict[str, np.ndarray]]:
    """Reads the description, the programs and the arrays of a file, without trusting it.

    Raises:
      FileNotFoundError: there is no file.
      ValueError: `write` did not write it, it is of a later version, or damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            record = _record(archive, path.stat().st_size)
            is_known = record["version"] <= VERSION
            names: list[str] = record["programs"] if is_known else []
            programs = {name: archive.read(f"programs/{i}") for i, name in enumerate(names)}
            arrays = _arrays(record["arrays"], archive.read(_WEIGHTS)) if is_known else {}
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(
            f"Cannot load {path}: it was not written by flaxfit.export.save, or it is damaged "
            f"({first_line(error)})."
        ) from error
    if not is_known:
        raise ValueError(
            f"Cannot load {path}: it has version {record['version']} of the format, this "
            f"flaxfit reads up to {VERSION}. Install a newer flaxfit."
        )
    return record, programs, arrays


def _record(archive: zipfile.ZipFile, size: int) -> dict[str, Json]:
    members = archive.infolist()
    # Stored members cannot expand: no zip bombs.
    if any(m.compress_type != zipfile.ZIP_STORED or m.flag_bits & 1 for m in members):
        raise ValueError("a part of it is compressed or encrypted")
    if sum(m.file_size for m in members) > size:
        raise ValueError("its parts are larger than the file")
    record = json.loads(archive.read(_DESCRIPTION))
    if record["format"] != FORMAT:
        raise ValueError(f"its format is {record['format']!r:.40}")
    return record


def _arrays(described: Iterable[Json], weights: bytes) -> dict[str, np.ndarray]:
    arrays, start = {}, 0
    for entry in described:
        name, shape, dtype = entry["name"], tuple(entry["shape"]), jnp.dtype(entry["dtype"])
        is_numeric = str(dtype) == entry["dtype"] and not dtype.hasobject and not dtype.fields
        if not is_numeric or min(shape, default=1) < 0:
            raise ValueError(f"{name!r:.60} is not a numeric array")
        size = math.prod(shape)
        if start + size * dtype.itemsize > len(weights):
            raise ValueError(f"the weights end before {name!r:.60}")
        arrays[name] = np.frombuffer(weights, dtype, size, start).reshape(shape)
        start += size * dtype.itemsize
    if start != len(weights):
        raise ValueError("there are more weights than it describes")
    return arrays
