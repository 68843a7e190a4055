"""The safetensors format: named arrays in one file, every size checked before it is believed."""

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

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


class Malformed(Exception):
    """A file is not a safetensors file, or not the one that was written."""


def write(file: BinaryIO, arrays: Mapping[str, np.ndarray], facts: Mapping[str, str]) -> None:
    """Writes arrays, facts about them (text), and a checksum of it all.

    Raises:
      ValueError: the format has no code for the dtype of some array.
    """
    _check_dtypes(arrays)
    # The widest elements first: with the padded header, every array is then aligned.
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    ends = list(itertools.accumulate((arrays[name].nbytes for name in names), initial=0))
    entries: dict[str, Any] = {
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
    """Reads the arrays of a file and the facts about them.

    Files of other libraries hold no checksum; their content is taken as it is.

    Raises:
      Malformed: the file's parts do not fit together, or were changed.
    """
    content = np.fromfile(path, np.uint8)
    n_header = int.from_bytes(content[:8].tobytes(), "little")
    if content.size < 8 or n_header > content.size - 8:
        raise Malformed(f"its header is longer than the file of {content.size:,} bytes")
    header, data = content[8 : 8 + n_header], content[8 + n_header :]
    entries = _parse(header.tobytes())
    facts = entries.pop(_FACTS, {})
    if not isinstance(facts, dict) or not all(isinstance(text, str) for text in facts.values()):
        raise Malformed(f"its {_FACTS} is not text")
    spans = {name: _span(name, entry) for name, entry in entries.items()}
    end = 0
    for start, stop in sorted(spans.values()):
        if start != end:
            raise Malformed(f"its arrays overlap or leave a gap at byte {min(start, end):,}")
        end = stop
    if end != data.size:
        raise Malformed(f"its arrays take {end:,} bytes, and it holds {data.size:,}")
    checksum = facts.pop(_CHECKSUM, None)
    if checksum is not None and checksum != _checksum(entries, facts, iter([data])):
        raise Malformed("its content was changed")
    return {name: _array(entries[name], data[slice(*span)]) for name, span in spans.items()}, facts


def _check_dtypes(arrays: Mapping[str, np.ndarray]) -> None:
    others = [f"{name} ({a.dtype})" for name, a in arrays.items() if a.dtype.name not in _CODES]
    if others:
        raise ValueError(
            f"Cannot write {', '.join(others)} to a safetensors file: it holds "
            f"{', '.join(_CODES)}. Convert these arrays, or save a whole checkpoint."
        )


def _parse(header: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"its header is not JSON ({str(error):.100})") from error
    if not isinstance(entries, dict):
        raise Malformed("its header is not a JSON object")
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def _span(name: str, entry: Any) -> tuple[int, int]:
    """Where the bytes of an array are, once what its entry says fits together."""
    match entry:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [start, stop]} if (
            len(entry) == 3
            and code in _DTYPES
            and all(type(n) is int and n >= 0 for n in (*shape, start, stop))
        ):
            if stop - start == math.prod(shape) * jnp.dtype(_DTYPES[code]).itemsize:
                return start, stop
    raise Malformed(f"its entry for {name!r:.100} makes no sense: {str(entry):.100}")


def _array(entry: Mapping[str, Any], content: np.ndarray) -> np.ndarray:
    try:
        array = content.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    except (ValueError, OverflowError) as error:  # More dimensions than NumPy has, or longer ones.
        raise Malformed(f"it holds an array of shape {str(entry['shape']):.100}") from error
    return array if array.flags.aligned else array.copy()


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """The elements in C order, little-endian, as bytes."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _checksum(
    entries: Mapping[str, Any], facts: Mapping[str, str], content: Iterator[np.ndarray]
) -> str:
    checksum = hashlib.sha256(json.dumps([entries, facts], sort_keys=True).encode())
    for part in content:
        checksum.update(part.data)
    return checksum.hexdigest()
