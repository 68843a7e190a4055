"""The safetensors format: named arrays in one file, with every size checked against the file."""

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import jax.numpy as jnp
import numpy as np

from flaxfit.tree import Json

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_FACTS = "__metadata__"
_CHECKSUM = "sha256"
_LONGEST_HEADER = 100_000_000  # The limit of the safetensors library.


class Malformed(ValueError):
    """A file is not a valid safetensors file, or its content was changed."""


def write(file: BinaryIO, arrays: Mapping[str, np.ndarray], facts: Mapping[str, str]) -> None:
    """Writes arrays, string metadata and a checksum of both."""
    others = [f"{name} ({a.dtype})" for name, a in arrays.items() if a.dtype.name not in _CODES]
    if others:
        raise ValueError(
            f"Cannot write {', '.join(others)} to a safetensors file, which supports "
            f"{', '.join(_CODES)}. Convert these arrays, or save a whole checkpoint."
        )
    # Widest elements first: with the padded header, this aligns every array.
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    ends = list(itertools.accumulate((arrays[name].nbytes for name in names), initial=0))
    entries: dict[str, Json] = {
        name: {
            "dtype": _CODES[arrays[name].dtype.name],
            "shape": list(arrays[name].shape),
            "data_offsets": [start, end],
        }
        for name, (start, end) in zip(names, itertools.pairwise(ends), strict=True)
    }
    checksum = _checksum(entries, facts, (_bytes_of(arrays[name]) for name in names))
    header = json.dumps({_FACTS: {**facts, _CHECKSUM: checksum}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)
    for name in names:
        file.write(_bytes_of(arrays[name]).data)


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Reads the arrays of a file into memory, and its metadata.

    Verifies the checksum that `write` adds; files of other libraries have none.
    """
    entries, facts, data = _split(np.fromfile(path, np.uint8))
    arrays = _views(entries, data)
    checksum = facts.pop(_CHECKSUM, None)
    if checksum is not None and checksum != _checksum(entries, facts, iter([data])):
        raise Malformed("its content was changed")
    aligned = {name: a if a.flags.aligned else a.copy() for name, a in arrays.items()}
    return aligned, facts


def map_arrays(path: Path) -> dict[str, np.ndarray]:
    """Maps the arrays of a file, read-only; a page is read when it is first accessed.

    Verifies no checksum, since that would read everything.
    """
    if not path.stat().st_size:
        raise Malformed("it is empty")
    entries, _, data = _split(np.asarray(np.memmap(path, mode="r")))
    return _views(entries, data)


def parse(text: bytes) -> dict[str, Json]:
    """Parses a JSON object of at most 100 MB whose names are unique."""
    if len(text) > _LONGEST_HEADER:
        raise Malformed(f"its JSON is longer than {_LONGEST_HEADER:,} bytes")
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"its JSON is invalid ({str(error):.100})") from error
    if not isinstance(entries, dict):
        raise Malformed("its JSON is not an object")
    return entries


def _split(content: np.ndarray) -> tuple[dict[str, Json], dict[str, str], np.ndarray]:
    """Splits a file into entries by name, metadata, and the bytes of the arrays."""
    n_header = int.from_bytes(content[:8].tobytes(), "little")
    if content.size < 8 or n_header > content.size - 8:
        raise Malformed(f"its header is longer than the file of {content.size:,} bytes")
    entries = parse(content[8 : 8 + n_header].tobytes())
    facts = entries.pop(_FACTS, {})
    if not isinstance(facts, dict) or not all(isinstance(text, str) for text in facts.values()):
        raise Malformed(f"its {_FACTS} does not map names to strings")
    return entries, facts, content[8 + n_header :]


def _views(entries: Mapping[str, Json], data: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the arrays as views, after checking that they cover the data exactly once."""
    spans = {name: _span(name, entry) for name, entry in entries.items()}
    # No gaps or overlaps: bytes that belong to no array or to two could hide other content.
    end = 0
    for start, stop in sorted(spans.values()):
        if start != end:
            raise Malformed(f"its arrays overlap or leave a gap at byte {min(start, end):,}")
        end = stop
    if end != data.size:
        raise Malformed(f"its arrays take {end:,} bytes, but it has {data.size:,}")
    return {name: _view(entries[name], data[slice(*span)]) for name, span in spans.items()}


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def _span(name: str, entry: Json) -> tuple[int, int]:
    """Returns the start and end of an array in the data, after checking its entry."""
    match entry:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [start, stop]} if (
            code in _DTYPES and all(type(n) is int and n >= 0 for n in (*shape, start, stop))
        ):
            if stop - start == math.prod(shape) * jnp.dtype(_DTYPES[code]).itemsize:
                return start, stop
    raise Malformed(f"its entry for {name!r:.100} is invalid or unsupported: {str(entry):.100}")


def _view(entry: Mapping[str, Json], content: np.ndarray) -> np.ndarray:
    try:
        return content.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    except (ValueError, OverflowError) as error:  # Exceeds NumPy's limits.
        raise Malformed(f"it has an array of shape {str(entry['shape']):.100}") from error


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """Returns the elements in C order, little-endian, as bytes."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _checksum(
    entries: Mapping[str, Json], facts: Mapping[str, str], content: Iterator[np.ndarray]
) -> str:
    checksum = hashlib.sha256(json.dumps([entries, facts], sort_keys=True).encode())
    for part in content:
        checksum.update(part.data)
    return checksum.hexdigest()
