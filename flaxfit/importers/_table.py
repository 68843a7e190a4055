"""The sorted tables (LevelDB's format) in which TensorFlow keeps the index of a checkpoint."""

import struct
from collections.abc import Iterator

from flaxfit.importers._crc32c import crc32c, unmasked
from flaxfit.importers._unreadable import require

_MAGIC = 0xDB4775248B80FB57
_FOOTER = 48
_TRAILER = 5
"""The bytes after each block: its compression, one byte, and a checksum, four."""
_MOST_GROWTH = 24
"""The longest copy of Snappy writes 64 bytes for 3, which bounds the size that a block states."""


def read_table(file: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a table, in order."""
    require(len(file) >= _FOOTER, "it is too short")
    require(struct.unpack_from("<Q", file, len(file) - 8)[0] == _MAGIC, "the end mark is missing")
    _, _, at = _handle(file, len(file) - _FOOTER)
    offset, size, _ = _handle(file, at)
    end = 0
    for _, handle in _entries(_block(file, offset, size)):
        start, size, _ = _handle(handle, 0)
        # Blocks follow one another: none is read, or takes memory, twice.
        require(start >= end, "its blocks overlap")
        end = start + size
        yield from _entries(_block(file, start, size))


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the variable-length integer at an offset, and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
    raise ValueError("an integer has more than 64 bits")


def _handle(data: bytes, at: int) -> tuple[int, int, int]:
    """Returns the offset and size of a block, and the offset after the two."""
    offset, at = varint(data, at)
    size, at = varint(data, at)
    return offset, size, at


def _block(file: bytes, offset: int, size: int) -> bytes:
    end = offset + size
    require(end + _TRAILER <= len(file), "a block is cut short")
    stored = unmasked(struct.unpack_from("<I", file, end + 1)[0])
    require(crc32c(file[offset : end + 1]) == stored, "the checksum of a block is wrong")
    compression = file[end]
    require(compression in (0, 1), f"a block has the unknown compression {compression}")
    return _decompress(file[offset:end]) if compression else file[offset:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the entries of a block; a key is stored as its difference from the one before it."""
    (n_restarts,) = struct.unpack_from("<I", block, len(block) - 4)
    end, at, key = len(block) - 4 * (n_restarts + 1), 0, b""
    require(end >= 0, "a block is cut short")
    while at < end:
        shared, at = varint(block, at)
        unshared, at = varint(block, at)
        size, at = varint(block, at)
        require(shared <= len(key) and unshared + size <= end - at, "an entry is cut short")
        key = key[:shared] + block[at : at + unshared]
        at += unshared
        yield key, block[at : at + size]
        at += size


def _decompress(data: bytes) -> bytes:
    """Decompresses a block in Snappy's format: literals, and copies from the output so far."""
    size, at = varint(data, 0)
    require(size <= _MOST_GROWTH * len(data), "a compressed block states an impossible size")
    result = bytearray()
    while at < len(data):
        tag = data[at]
        at += 1
        kind, rest = tag & 3, tag >> 2
        if kind == 0:
            width = max(rest - 59, 0)
            length = 1 + (int.from_bytes(data[at : at + width], "little") if width else rest)
            at += width
            require(length <= len(data) - at, "a compressed block is cut short")
            result += data[at : at + length]
            at += length
        else:
            if kind == 1:
                length, offset, width = 4 + (rest & 7), (rest >> 3) << 8 | data[at], 1
            else:
                width = 2 if kind == 2 else 4
                length, offset = 1 + rest, int.from_bytes(data[at : at + width], "little")
            at += width
            require(0 < offset <= len(result), "a compressed block refers to before its start")
            start = len(result) - offset
            # A copy that reaches into its own output repeats it.
            piece = bytes(result[start : start + length])
            result += (piece * -(-length // len(piece)))[:length]
        require(len(result) <= size, "a compressed block is longer than it states")
    require(len(result) == size, "a compressed block is shorter than it states")
    return bytes(result)
