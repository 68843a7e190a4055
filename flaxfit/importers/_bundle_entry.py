"""Entries of the index of a TensorFlow checkpoint, which are messages of Protocol Buffers."""

import dataclasses
import struct
from collections.abc import Iterator

from flaxfit.importers._table import varint
from flaxfit.importers._unreadable import require

Extent = tuple[int, int]
"""Start and length in one dimension; length -1 means all of it."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """The entry of the index for one variable, or for one part of a partitioned one."""

    dtype: int = 0
    shape: tuple[int, ...] = ()
    shard: int = 0
    offset: int = 0
    size: int = 0
    checksum: int | None = None
    slices: tuple[list[Extent], ...] = ()


def n_shards_in(header: bytes) -> int:
    """Returns the number of data files that a `BundleHeaderProto` states."""
    values = dict(_fields(header))
    require(values.get(2, 0) == 0, "it was written on a big-endian machine")
    n_shards = _integer(values.get(1, 1))
    require(0 < n_shards < 100_000, f"it states {n_shards} data files")
    return n_shards


def read_entry(content: bytes) -> Entry:
    """Parses a `BundleEntryProto`."""
    numbers: dict[int, int] = {}
    shape: tuple[int, ...] = ()
    slices = []
    for number, value in _fields(content):
        if number == 2:
            dims = [dim for n, dim in _fields(value) if n == 2]
            shape = tuple(_integer(dict(_fields(dim)).get(1, 0)) for dim in dims)
        elif number == 7:
            slices.append(_extents(value))
        else:
            numbers[number] = _integer(value)
    return Entry(
        dtype=numbers.get(1, 0),
        shape=shape,
        shard=numbers.get(3, 0),
        offset=numbers.get(4, 0),
        size=numbers.get(5, 0),
        checksum=numbers.get(6),
        slices=tuple(slices),
    )


def _extents(content: int | bytes) -> list[Extent]:
    """Parses a `TensorSliceProto`: the extents of a part, one for each dimension."""
    found = []
    for number, value in _fields(content):
        if number == 1:
            parts = {n: _integer(v) for n, v in _fields(value)}
            found.append((parts.get(1, 0), parts.get(2, -1)))
    return found


def slice_key(name: str, extents: list[Extent]) -> bytes:
    """Returns the key of the index for one part of a variable."""
    escaped = name.encode().replace(b"\xff", b"\xff\x00").replace(b"\x00", b"\x00\xff")
    n_dimensions = len(extents).to_bytes(1, "big") if extents else b""
    header = bytes([len(n_dimensions)]) + n_dimensions
    numbers = b"".join(_ordered(number) for extent in extents for number in extent)
    return b"\x00" + escaped + b"\x00\x01" + header + numbers


def _ordered(number: int) -> bytes:
    """Encodes a number so that its bytes sort as it does: leading ones count the bytes."""
    width = (number if number >= 0 else ~number).bit_length() // 7 + 1
    header = ((1 << width) - 1) << (8 * width - width)
    value = number & ((1 << (8 * width)) - 1)
    return (value ^ header).to_bytes(width, "big")


def place_of(extents: list[Extent], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Returns the slices of an array that a part fills."""
    places = []
    for (start, length), size in zip(extents, shape, strict=True):
        stop = size if length == -1 else start + length
        require(0 <= start <= stop <= size, "a part of a partitioned variable lies outside of it")
        places.append(slice(start, stop))
    return tuple(places)


def _fields(message: int | bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the fields of a Protocol Buffers message: number and value, bytes if not a number."""
    if isinstance(message, int):
        raise ValueError("a field is a number where a message belongs")
    at = 0
    while at < len(message):
        tag, at = varint(message, at)
        match tag & 7:
            case 0:
                value, at = varint(message, at)
            case 1:
                value, at = struct.unpack_from("<Q", message, at)[0], at + 8
            case 2:
                size, at = varint(message, at)
                require(size <= len(message) - at, "a field is cut short")
                value, at = message[at : at + size], at + size
            case 5:
                value, at = struct.unpack_from("<I", message, at)[0], at + 4
            case wire_type:
                raise ValueError(f"a field has the unknown wire type {wire_type}")
        yield tag >> 3, value


def _integer(value: int | bytes) -> int:
    """Returns the value of a field that must be a number."""
    if isinstance(value, bytes):
        raise ValueError("a field is text where a number belongs")
    return value
