"""load_msgpack: the files that `flax.serialization.to_bytes` gives, mapped into memory."""

import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flaxfit.importers._dtypes import as_dtype
from flaxfit.importers._lazy import LazyArray, LazyThreadPoolArray
from flaxfit.importers._mapped import map_file, mapped_array
from flaxfit.importers._unreadable import reading, require
from flaxfit.tree._checks import local_path

KIND = "a MessagePack file of Flax"
_DEEPEST = 64
_CHUNKED = "__msgpack_chunked_array__"
_COMPLEX, _ARRAYS = 2, (1, 3)
"""The extensions that Flax writes: arrays, Python's complex numbers and NumPy's scalars."""
_NUMBERS = {0xCA: ">f", 0xCB: ">d"} | {
    0xCC + i: code for i, code in enumerate((">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q"))
}


class _Bytes(NamedTuple):
    """Where bytes lie in the file."""

    start: int
    stop: int


def load_msgpack(path: str | os.PathLike[str]) -> dict[str, LazyArray]:
    """Opens the arrays of a file that `flax.serialization.to_bytes` gave, by "/"-joined path.

    Numbers become arrays without dimensions; text and None are left out.

    >>> import tempfile
    >>> from flax import serialization
    >>> path = Path(tempfile.mkdtemp(), "weights.msgpack")
    >>> _ = path.write_bytes(serialization.to_bytes({"dense": {"bias": np.ones(3)}}))
    >>> load_msgpack(path)
    {'dense/bias': LazyThreadPoolArray(shape=(3,), dtype=float64)}

    Raises:
      FileNotFoundError: there is no such file.
      UnreadableFile: it is damaged, or another kind of MessagePack file.
    """
    path = local_path(path)
    with reading(path, KIND):
        tree = read_tree(path)
        require(isinstance(tree, dict), "it does not start with names")
        leaves = list(_leaves(tree, ""))
        arrays = {name: _as_lazy(leaf) for name, leaf in leaves if not isinstance(leaf, str)}
        require(len(leaves) == len({name for name, _ in leaves}), "a name occurs twice")
        return arrays


def read_tree(path: Path) -> Any:
    """What a file holds: dicts, lists, numbers, text, and lazy arrays."""
    content = map_file(path)
    tree, at = _read(content, 0, _DEEPEST)
    require(at == len(content), "there is more behind its end")
    return tree


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for name, branch in items:
            yield from _leaves(branch, f"{path}/{name}" if path else str(name))
    elif tree is not None:
        yield path, tree


def _as_lazy(leaf: Any) -> LazyArray:
    if isinstance(leaf, LazyArray):
        return leaf
    require(not isinstance(leaf, _Bytes), "it holds bytes where arrays belong")
    array = np.asarray(leaf)
    return LazyThreadPoolArray(array.shape, array.dtype, lambda: array)


def _read(content: Any, at: int, depth: int) -> tuple[Any, int]:
    """The value at a position, and the position behind it."""
    require(depth > 0, f"it is nested more than {_DEEPEST} deep")
    tag, at = content[at], at + 1
    if tag < 0x80 or tag >= 0xE0:
        return tag - 0x100 * (tag >= 0xE0), at
    if tag < 0x90 or tag in (0xDE, 0xDF):
        n, at = (tag & 0xF, at) if tag < 0x90 else _size(content, at, 2 << (tag - 0xDE))
        return _read_map(content, at, n, depth - 1)
    if tag < 0xA0 or tag in (0xDC, 0xDD):
        n, at = (tag & 0xF, at) if tag < 0xA0 else _size(content, at, 2 << (tag - 0xDC))
        return _read_list(content, at, n, depth - 1)
    if tag < 0xC0 or 0xD9 <= tag <= 0xDB:
        n, at = (tag & 0x1F, at) if tag < 0xC0 else _size(content, at, 1 << (tag - 0xD9))
        span = _span(content, at, n)
        return content[span.start : span.stop].decode(), span.stop
    if tag in _NUMBERS:
        code = _NUMBERS[tag]
        return struct.unpack_from(code, content, at)[0], at + struct.calcsize(code)
    if 0xC4 <= tag <= 0xC6:
        span = _span(content, *_size(content, at, 1 << (tag - 0xC4))[::-1])
        return span, span.stop
    if 0xC7 <= tag <= 0xC9 or 0xD4 <= tag <= 0xD8:
        is_fixed = tag >= 0xD4
        n, at = (1 << (tag - 0xD4), at) if is_fixed else _size(content, at, 1 << (tag - 0xC7))
        span = _span(content, at + 1, n)
        return _read_extension(content, content[at], span, depth - 1), span.stop
    require(tag != 0xC1, "it has a byte that MessagePack does not use")
    return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at


def _size(content: Any, at: int, width: int) -> tuple[int, int]:
    require(at + width <= len(content), "it is cut short")
    return int.from_bytes(content[at : at + width], "big"), at + width


def _span(content: Any, at: int, size: int) -> _Bytes:
    require(at + size <= len(content), "it is cut short")
    return _Bytes(at, at + size)


def _read_map(content: Any, at: int, n: int, depth: int) -> tuple[Any, int]:
    require(2 * n <= len(content) - at, "it is cut short")
    found: dict[str, Any] = {}
    for _ in range(n):
        name, at = _read(content, at, depth)
        require(isinstance(name, str | int) and str(name) not in found, "a name is wrong or twice")
        found[str(name)], at = _read(content, at, depth)
    return (_joined(found) if _CHUNKED in found else found), at


def _read_list(content: Any, at: int, n: int, depth: int) -> tuple[list[Any], int]:
    require(n <= len(content) - at, "it is cut short")
    found = []
    for _ in range(n):
        value, at = _read(content, at, depth)
        found.append(value)
    return found, at


def _read_extension(content: Any, code: int, span: _Bytes, depth: int) -> Any:
    """An array or a complex number: a list of a few values in the bytes of an extension."""
    require(code in (_COMPLEX, *_ARRAYS), f"it has the unknown extension {code}")
    parts, end = _read(content, span.start, depth)
    require(end == span.stop and isinstance(parts, list), "an array is malformed")
    if code == _COMPLEX:
        real, imaginary = parts
        return complex(real, imaginary)
    shape, name, data = parts
    if isinstance(name, _Bytes):  # As old versions of MessagePack wrote text.
        name = content[name.start : name.stop].decode()
    return mapped_array(content, data.start, data.stop, tuple(shape), as_dtype(name))


def _joined(found: Mapping[str, Any]) -> LazyArray:
    """An array of more than a gigabyte, which Flax writes as several flat ones."""
    shape = tuple(_values(found["shape"]))
    chunks = _values(found["chunks"])
    require(all(isinstance(c, LazyArray) and c.ndim == 1 for c in chunks), "a chunk is no array")
    dtype = chunks[0].dtype
    whole = LazyThreadPoolArray(
        (sum(chunk.size for chunk in chunks),),
        dtype,
        lambda: np.concatenate([chunk.get() for chunk in chunks]),
    )
    require(all(chunk.dtype == dtype for chunk in chunks), "the dtypes of chunks differ")
    return whole.reshape(shape)


def _values(listed: Any) -> list[Any]:
    """A sequence, which Flax writes as a dict of its positions."""
    return list(listed.values()) if isinstance(listed, dict) else list(listed)
