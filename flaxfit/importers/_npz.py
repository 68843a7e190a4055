"""load_npz: reads NumPy's archives of arrays, without pickle."""

import math
import os
import zipfile
from pathlib import Path
from typing import IO

import numpy as np

from flaxfit.importers._lazy import LazyArray, LazyThreadPoolArray
from flaxfit.importers._unreadable import as_dtype, reading, require
from flaxfit.tree import local_path

_KIND = "an .npz file of numbers"
_MOST_GROWTH = 1100
"""Deflate expands one byte to at most 1032: a larger stated size is false."""


def load_npz(path: str | os.PathLike[str]) -> dict[str, LazyArray]:
    """Opens the arrays of an `.npz` file that `np.savez` or `np.savez_compressed` wrote.

    A dtype of two bytes and unknown kind is bfloat16, which NumPy saves like that. Arrays of
    objects raise an error: reading them would run code in the file.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/weights.npz"
    >>> np.savez(path, **{"dense/kernel": np.ones((2, 3))})
    >>> load_npz(path)
    {'dense/kernel': LazyThreadPoolArray(shape=(2, 3), dtype=float64)}

    Raises:
      FileNotFoundError: the file does not exist.
      UnreadableFile: it is damaged, or holds more than numbers.
    """
    path = local_path(path)
    with reading(path, _KIND, NotImplementedError, RuntimeError), zipfile.ZipFile(path) as archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
        found = {
            member.filename.removesuffix(".npy"): _lazy(path, archive, member) for member in members
        }
        require(len(found) == len(members), "it has several arrays of one name")
        return found


def _lazy(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> LazyArray:
    growth = 1 if member.compress_type == zipfile.ZIP_STORED else _MOST_GROWTH
    n_bytes = path.stat().st_size
    held = min(member.compress_size, n_bytes)
    require(0 <= member.header_offset < n_bytes, f"{member.filename} lies outside of the file")
    require(member.file_size <= growth * held, f"the size of {member.filename} is impossible")
    with archive.open(member) as file:
        shape, is_fortran, dtype = _header(file)
    size = math.prod(shape) * dtype.itemsize
    require(0 <= size <= member.file_size, f"the size of {member.filename} is wrong")

    # Open and check again when reading: the file may have changed since.
    def read() -> np.ndarray:
        with (
            reading(f"{member.filename} of {path}", _KIND, NotImplementedError, RuntimeError),
            zipfile.ZipFile(path) as archive,
            archive.open(member) as file,
        ):
            _header(file)
            content = file.read(size)
            require(len(content) == size, "it is cut short")
            # Reading to the end also makes zipfile verify the checksum.
            require(not file.read(1), "it is longer than its shape")
            array = np.frombuffer(content, dtype)
            return array.reshape(shape, order="F" if is_fortran else "C")

    return LazyThreadPoolArray(shape, dtype, read)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Reads shape, order and dtype of an array in NumPy's format."""
    version = np.lib.format.read_magic(file)
    # Version 3 differs from 2 by names of fields, which numbers do not have.
    require(version in ((1, 0), (2, 0)), f"it has the unknown version {version}")
    read = np.lib.format.read_array_header_1_0
    if version == (2, 0):
        read = np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    require(len(shape) <= 32 and all(0 <= n <= 1 << 62 for n in shape), "its shape is impossible")
    unknown_of_two = dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None
    return shape, is_fortran, as_dtype("bfloat16" if unknown_of_two else dtype.str)
