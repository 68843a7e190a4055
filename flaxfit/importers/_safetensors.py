"""load_safetensors: the files in which Hugging Face's models come, mapped into memory."""

import json
import os
from pathlib import Path
from typing import Any

from flaxfit.importers._dtypes import as_dtype
from flaxfit.importers._lazy import LazyArray
from flaxfit.importers._mapped import map_file, mapped_array
from flaxfit.importers._unreadable import UnreadableFile, reading, require
from flaxfit.tree._checks import local_path

_KIND = "a safetensors file"
_LONGEST_HEADER = 100_000_000
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


def load_safetensors(path: str | os.PathLike[str]) -> dict[str, LazyArray]:
    """Opens the weights of a safetensors file, or of several that an index lists.

    The header is read at once; arrays are views of the mapped file, read when they are touched.

    >>> load_safetensors("no_such_folder/model.safetensors")
    Traceback (most recent call last):
    FileNotFoundError: No safetensors file at no_such_folder/model.safetensors.

    Args:
      path: a file, an index (`model.safetensors.index.json`), or a folder with either.

    Raises:
      FileNotFoundError: there is no such file.
      UnreadableFile: it is damaged, or of a kind that is not supported.
    """
    path = local_path(path)
    if path.is_dir():
        single = path / "model.safetensors"
        path = single if single.exists() else path / "model.safetensors.index.json"
    if not path.is_file():
        raise FileNotFoundError(f"No safetensors file at {path}.")
    return _read_index(path) if path.suffix == ".json" else _read_file(path)


def _read_file(path: Path) -> dict[str, LazyArray]:
    with reading(path, _KIND):
        content = map_file(path)
        n_header = int.from_bytes(content[:8], "little")
        require(len(content) >= 8 and n_header <= len(content) - 8, "its header is cut short")
        require(n_header <= _LONGEST_HEADER, "its header is longer than 100 MB")
        header = _parse(content[8 : 8 + n_header])
        header.pop("__metadata__", None)
        arrays = {}
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            dtype = as_dtype(_DTYPES.get(entry["dtype"], entry["dtype"]))
            base, shape = 8 + n_header, tuple(entry["shape"])
            arrays[name] = mapped_array(content, base + start, base + stop, shape, dtype)
        return arrays


def _read_index(path: Path) -> dict[str, LazyArray]:
    """The arrays of all files that an index names; they have to lie beside it."""
    with reading(path, "an index of safetensors files"):
        require(path.stat().st_size <= _LONGEST_HEADER, "it is longer than 100 MB")
        file_of = dict(_parse(path.read_bytes())["weight_map"])
        names = sorted(set(file_of.values()))
        require(all(Path(name).name == name for name in names), "it names files elsewhere")
    files = {}
    for name in names:
        if not (path.parent / name).is_file():
            raise UnreadableFile(f"Cannot read {path}: its file {name} is missing.")
        files[name] = _read_file(path.parent / name)
    with reading(path, "an index of safetensors files"):
        return {array: files[name][array] for array, name in file_of.items()}


def _parse(text: bytes) -> dict[str, Any]:
    entries = json.loads(text, object_pairs_hook=_unique)
    require(isinstance(entries, dict), "it does not start with names")
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    require(len(entries) == len(pairs), "a name occurs twice")
    return entries
