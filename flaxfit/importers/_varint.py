"""The variable-length integers and tagged fields of Protocol Buffers."""

import struct
from collections.abc import Iterator

from flaxfit.importers._unreadable import require


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The integer at an offset, and the offset after it.

    >>> varint(bytes([0xAC, 0x02]), 0)
    (300, 2)
    """
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
    raise ValueError("an integer has more than 64 bits")


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The number and value of each field of a message; bytes for strings and messages.

    >>> list(fields(bytes([0x08, 0x05, 0x12, 0x01, 0x41])))
    [(1, 5), (2, b'A')]
    """
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


def integer(value: int | bytes) -> int:
    """The value of a field that must be a number."""
    if isinstance(value, bytes):
        raise ValueError("a field is text where a number belongs")
    return value


def message(value: int | bytes) -> bytes:
    """The value of a field that must be a message."""
    if isinstance(value, int):
        raise ValueError("a field is a number where a message belongs")
    return value
