"""load_tf_ckpt: reads TensorFlow's checkpoints (tensor bundles) without TensorFlow."""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from flaxfit.importers._bundle_entry import Entry, n_shards_in, place_of, read_entry, slice_key
from flaxfit.importers._crc32c import crc32c, unmasked
from flaxfit.importers._lazy import LazyArray, LazyThreadPoolArray
from flaxfit.importers._table import read_table
from flaxfit.importers._unreadable import UnreadableFile, reading, require
from flaxfit.tree._checks import local_path

_KIND = "a TensorFlow checkpoint (version 2)"
_TEXT = 7
_DTYPES: Mapping[int, type[np.generic]] = {
    1: np.float32,
    2: np.float64,
    3: np.int32,
    4: np.uint8,
    5: np.int16,
    6: np.int8,
    8: np.complex64,
    9: np.int64,
    10: np.bool_,
    14: ml_dtypes.bfloat16,
    17: np.uint16,
    18: np.complex128,
    19: np.float16,
    22: np.uint32,
    23: np.uint64,
    24: ml_dtypes.float8_e5m2,
    25: ml_dtypes.float8_e4m3fn,
}


def load_tf_ckpt(path: str | os.PathLike[str]) -> dict[str, LazyArray]:
    """Opens a checkpoint that TensorFlow's savers wrote, without TensorFlow.

    Reads the index at once, and each array when it is accessed, verifying its checksum. Joins
    partitioned variables. Leaves out text, such as the object graph of newer checkpoints.

    >>> load_tf_ckpt("no_such_folder/model.ckpt-1000")
    Traceback (most recent call last):
    FileNotFoundError: No TensorFlow checkpoint at no_such_folder/model.ckpt-1000: ...

    Args:
      path: the prefix of its files ("folder/model.ckpt-1000"), any one of them, or a folder whose
        `checkpoint` file names the newest prefix. The files are always read from the given folder,
        even if that file names another one, from which they were copied.

    Raises:
      FileNotFoundError: the checkpoint does not exist.
      UnreadableFile: it is damaged, or of an unsupported kind.
    """
    prefix = _prefix(local_path(path))
    index = Path(f"{prefix}.index")
    if not index.is_file():
        raise FileNotFoundError(
            f"No TensorFlow checkpoint at {path}: expected a folder, or a prefix with files such "
            f"as {index.name} and {prefix.name}.data-00000-of-00001."
        )
    with reading(index, _KIND):
        table = dict(read_table(index.read_bytes()))
        n_shards = n_shards_in(table.get(b"", b""))
        arrays: dict[str, LazyArray] = {}
        for key, value in table.items():
            if key[:1] in (b"", b"\0"):  # The header, and the parts of partitioned variables.
                continue
            name, entry = key.decode(), read_entry(value)
            if entry.dtype != _TEXT:
                arrays[name] = _lazy(prefix, n_shards, name, entry, table)
        return arrays


def _prefix(path: Path) -> Path:
    """Returns the common prefix of the paths of a checkpoint's files."""
    if not path.is_dir():
        return path.with_name(re.sub(r"\.(index|meta|data-\d+-of-\d+)$", "", path.name))
    try:
        text = (path / "checkpoint").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        text = ""
    named = re.search(r'^model_checkpoint_path:\s*"([^"]*)"', text, re.MULTILINE)
    if named:
        return path / re.split(r"[/\\]", named[1])[-1]
    found = sorted(path.glob("*.index"))
    if len(found) == 1:
        return found[0].with_suffix("")
    if not found:
        raise FileNotFoundError(
            f"There is no checkpoint in the folder {path}: TensorFlow's have a file whose name "
            "ends with .index."
        )
    names = ", ".join(file.stem for file in found[:10])
    raise FileNotFoundError(
        f"Cannot tell which checkpoint of {path} to read: it has no file named checkpoint that "
        f"says so. Give the path of one of these: {names}."
    )


def _lazy(
    prefix: Path, n_shards: int, name: str, entry: Entry, table: Mapping[bytes, bytes]
) -> LazyArray:
    if entry.dtype not in _DTYPES:
        raise UnreadableFile(
            f"Cannot read {prefix}.index: {name} has TensorFlow's dtype number {entry.dtype}, "
            "which NumPy lacks. Leave this variable out when writing the checkpoint."
        )
    dtype = np.dtype(_DTYPES[entry.dtype])
    parts = [(entry, ())]
    if entry.slices:
        found = [read_entry(table[slice_key(name, extents)]) for extents in entry.slices]
        places = [place_of(extents, entry.shape) for extents in entry.slices]
        parts = list(zip(found, places, strict=True))
    sizes = [part.size for part, _ in parts]
    stated = math.prod(entry.shape) * dtype.itemsize
    require(len(entry.shape) <= 32 and sum(sizes) == stated, f"the size of {name} is wrong")

    def read() -> np.ndarray:
        with reading(f"{name} of {prefix}", _KIND):
            if not entry.slices:
                return _read(prefix, n_shards, entry, dtype).reshape(entry.shape)
            whole = np.empty(entry.shape, dtype)
            for part, place in parts:
                whole[place] = _read(prefix, n_shards, part, dtype).reshape(whole[place].shape)
            return whole

    return LazyThreadPoolArray(entry.shape, dtype, read)


def _read(prefix: Path, n_shards: int, entry: Entry, dtype: np.dtype) -> np.ndarray:
    path = Path(f"{prefix}.data-{entry.shard:05d}-of-{n_shards:05d}")
    if not path.is_file():
        raise UnreadableFile(f"Cannot read {prefix}: its data file {path.name} is missing.")
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - entry.offset
        require(entry.size <= left, f"its data file {path.name} is cut short")
        file.seek(entry.offset)
        data = np.fromfile(file, np.uint8, entry.size)
    is_whole = entry.checksum is None or crc32c(data) == unmasked(entry.checksum)
    require(is_whole, f"the checksum of the data in {path.name} is wrong")
    return data.view(dtype)
