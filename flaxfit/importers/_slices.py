"""The parts of partitioned TensorFlow variables: where they lie, and the keys they have."""

from flaxfit.importers._varint import fields, integer, message

Extent = tuple[int, int]
"""Start and length in one dimension; length -1 means all of it."""


def read_slice(slice_message: bytes) -> list[Extent]:
    """The extents that a `TensorSliceProto` lists, one for each dimension."""
    extents = []
    for number, value in fields(slice_message):
        if number == 1:
            parts = {n: integer(v) for n, v in fields(message(value))}
            extents.append((parts.get(1, 0), parts.get(2, -1)))
    return extents


def slice_key(name: str, extents: list[Extent]) -> bytes:
    """The key under which the index keeps one part of a variable."""
    escaped = name.encode().replace(b"\xff", b"\xff\x00").replace(b"\x00", b"\x00\xff")
    lengths = b"".join(_signed(number) for extent in extents for number in extent)
    return b"\x00" + escaped + b"\x00\x01" + _unsigned(len(extents)) + lengths


def place_of(extents: list[Extent], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The part of an array that extents mean.

    >>> place_of([(2, 3), (0, -1)], (10, 4))
    (slice(2, 5, None), slice(0, 4, None))
    """
    places = []
    for (start, length), size in zip(extents, shape, strict=True):
        stop = size if length == -1 else start + length
        if not 0 <= start <= stop <= size:
            raise ValueError("a part of a partitioned variable lies outside of it")
        places.append(slice(start, stop))
    return tuple(places)


def _unsigned(number: int) -> bytes:
    digits = number.to_bytes((number.bit_length() + 7) // 8, "big")
    return bytes([len(digits)]) + digits


def _signed(number: int) -> bytes:
    """A number whose bytes sort as it does: leading ones tell how many bytes it has."""
    width = (number if number >= 0 else ~number).bit_length() // 7 + 1
    header = ((1 << width) - 1) << (8 * width - width)
    value = number & ((1 << (8 * width)) - 1)
    return (value ^ header).to_bytes(width, "big")
