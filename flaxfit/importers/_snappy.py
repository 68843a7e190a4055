"""Snappy decompression, for the indexes of TensorFlow's checkpoints."""

from flaxfit.importers._unreadable import require
from flaxfit.importers._varint import varint

_MOST_GROWTH = 24
"""The longest copy gives 64 bytes for 3, so that the stated size can be checked beforehand."""


def decompress(data: bytes) -> bytes:
    """The bytes that a Snappy block holds.

    >>> decompress(bytes([7, 0b1000]) + b"abc" + bytes([0b1, 3]))
    b'abcabca'
    """
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
            # A copy may reach into what it writes: it then repeats.
            piece = bytes(result[start : start + length])
            result += (piece * -(-length // len(piece)))[:length]
        require(len(result) <= size, "a compressed block is longer than it states")
    require(len(result) == size, "a compressed block is shorter than it states")
    return bytes(result)
