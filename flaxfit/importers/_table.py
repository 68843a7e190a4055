"""The sorted tables (LevelDB's format) in which TensorFlow keeps the index of a checkpoint."""

import struct
from collections.abc import Iterator

from flaxfit.importers._crc32c import crc32c, unmasked
from flaxfit.importers._snappy import decompress
from flaxfit.importers._unreadable import require
from flaxfit.importers._varint import varint

_MAGIC = 0xDB4775248B80FB57
_FOOTER = 48
_TRAILER = 5
"""Behind each block: its compression, one byte, and a checksum, four."""


def read_table(file: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The keys and values of a table, in order.

    Raises:
      ValueError: the bytes are not a table, or they are damaged.
    """
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


def _handle(data: bytes, at: int) -> tuple[int, int, int]:
    """Offset and size of a block, and the offset behind the two."""
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
    return decompress(file[offset:end]) if compression else file[offset:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The entries of a block; each key is stored as what differs from the one before it."""
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
