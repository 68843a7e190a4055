"""Zstandard, unpacked block by block: whoever reads takes no more memory than what was read."""

from collections.abc import Iterator, Sequence
from typing import Any

from flaxfit.checkpoints._zstd_codes import Bits, Damaged, Table, read_huffman, read_table, table_of

BLOCK = 1 << 17
"""What a block unpacks to, at most."""
_MAGIC = b"\x28\xb5\x2f\xfd"
_RAW, _REPEATED, _COMPRESSED = range(3)


def blocks(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Where the blocks of a frame lie: kind, start, stored bytes, and bytes unpacked at most.

    Only their headers are read.
    """
    if data[:4] != _MAGIC or len(data) < 6:
        raise Damaged("it is no Zstandard frame")
    flags = data[4]
    is_single, has_dictionary = bool(flags & 0x20), flags & 3
    if flags & 0x08 or has_dictionary:
        raise Damaged("its Zstandard frame needs what is not there")
    size_bytes = (is_single, 2, 4, 8)[flags >> 6]
    start, is_last = 5 + (not is_single) + size_bytes, False
    while not is_last:
        header = int.from_bytes(data[start : start + 3], "little")
        is_last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        start += 3
        stored = 1 if kind == _REPEATED else size
        if kind > _COMPRESSED or size > BLOCK or start + stored > len(data):
            raise Damaged("its Zstandard frame is damaged")
        yield kind, start, stored, BLOCK if kind == _COMPRESSED else size
        start += stored


def unpack(data: bytes, out: bytearray) -> Iterator[None]:
    """Appends what a frame holds to `out`, one block at each step.

    >>> out = bytearray()
    >>> for _ in unpack(bytes.fromhex("28b52ffd20052b000061"), out):
    ...     print(out)
    bytearray(b'aaaaa')

    Raises:
      Damaged: at the block that is not what the format says.
    """
    decoder = _Decoder(out)
    for kind, start, stored, most in blocks(data):
        body = data[start : start + stored]
        if kind == _COMPRESSED:
            before = len(out)
            try:
                decoder.decode(body)
            except (IndexError, ValueError) as error:
                raise Damaged("a block of its Zstandard frame is damaged") from error
            if len(out) - before > BLOCK:
                raise Damaged("a block of its Zstandard frame is too large")
        else:
            out += body if kind == _RAW else body * most
        yield


def _ladder(n_plain: int, first: int, widths: Sequence[int]) -> list[tuple[int, int]]:
    """Of every code of a length: where it begins, and how many bits tell the rest."""
    steps, base = [(first + i, 0) for i in range(n_plain)], first + n_plain
    for width in widths:
        steps.append((base, width))
        base += 1 << width
    return steps


_LITERALS = _ladder(16, 0, (1, 1, 1, 1, 2, 2, 3, 3, 4, 6, *range(7, 17)))
_MATCHES = _ladder(32, 3, (1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, *range(7, 17)))
# Of literals, offsets and matches: the code that is known, its finest, and the last symbol.
_KNOWN = (
    (table_of([4, 3, *[2] * 11, 1, 1, 1, *[2] * 9, 3, 2, *[1] * 5, *[-1] * 4], 6), 9, 35),
    (table_of([*[1] * 6, 2, 2, 2, *[1] * 15, *[-1] * 5], 5), 8, 31),
    (table_of([1, 4, 3, *[2] * 6, *[1] * 37, *[-1] * 7], 6), 9, 52),
)


class _Decoder:
    """What one block leaves to the next: what was unpacked, codes, and the last offsets."""

    def __init__(self, out: bytearray) -> None:
        self.out = out
        self.offsets = [1, 4, 8]
        self.tables: list[Table | None] = [None, None, None]
        self.huffman: list[tuple[int, int]] = []

    def decode(self, data: bytes) -> None:
        literals, data = self._literals(data)
        self._sequences(literals, data)

    def _literals(self, data: bytes) -> tuple[bytes, bytes]:
        kind, form = data[0] & 3, data[0] >> 2 & 3
        if kind < _COMPRESSED:
            head, shift = (1, 3) if form in (0, 2) else (2 + (form == 3), 4)
            size = int.from_bytes(data[:head], "little") >> shift
            stored = size if kind == _RAW else 1
            literals = data[head : head + stored] * (1 if kind == _RAW else size)
            self._require(len(data) >= head + stored and size <= BLOCK)
            return literals, data[head + stored :]
        head, width = ((3, 10), (3, 10), (4, 14), (5, 18))[form]
        sizes = int.from_bytes(data[:head], "little") >> 4
        size, stored = sizes & ((1 << width) - 1), sizes >> width
        self._require(size <= BLOCK and len(data) >= head + stored)
        body, rest = data[head : head + stored], data[head + stored :]
        if kind == _COMPRESSED:
            self.huffman, n_bytes = read_huffman(body)
            body = body[n_bytes:]
        if form == 0:
            return self._symbols(body, size), rest
        ends = [int.from_bytes(body[i : i + 2], "little") for i in (0, 2, 4)]
        starts = [6, 6 + ends[0], 6 + ends[0] + ends[1], 6 + sum(ends), len(body)]
        quarter = (size + 3) // 4
        counts = [quarter, quarter, quarter, size - 3 * quarter]
        self._require(starts[3] < len(body) and counts[3] >= 0)
        parts = [self._symbols(body[starts[i] : starts[i + 1]], counts[i]) for i in range(4)]
        return b"".join(parts), rest

    def _symbols(self, data: bytes, count: int) -> bytes:
        """So many symbols of a Huffman code."""
        bits, huffman = Bits(data), self.huffman
        width = len(huffman).bit_length() - 1
        found = bytearray(count)
        padded, left, mask = bits.data, bits.left + 64 - width, (1 << width) - 1
        for i in range(count):
            at = left >> 3
            window = int.from_bytes(padded[at : at + 4], "little")
            found[i], n_bits = huffman[window >> (left & 7) & mask]
            left -= n_bits
        bits.left = left - 64 + width
        bits.check_end()
        return bytes(found)

    def _sequences(self, literals: bytes, data: bytes) -> None:
        count, at = data[0], 1
        if count == 255:
            count, at = int.from_bytes(data[1:3], "little") + 0x7F00, 3
        elif count > 127:
            count, at = (count - 128 << 8) + data[1], 2
        if not count:
            self._require(len(data) == at)
            self.out += literals
            return
        modes, at = data[at], at + 1
        self._require(not modes & 3)
        for i in range(3):
            at += self._choose(i, modes >> (6 - 2 * i) & 3, data[at:])
        bits, taken, before = Bits(data[at:]), 0, len(self.out)
        tables: list[Any] = self.tables
        states = [bits.read(table.log) for table in tables]
        for n_left in range(count, 0, -1):
            length, offset, match = (
                table.symbols[state] for table, state in zip(tables, states, strict=True)
            )
            distance = (1 << offset) + bits.read(offset)
            start, width = _MATCHES[match]
            n_copied = start + bits.read(width)
            start, width = _LITERALS[length]
            n_literals = start + bits.read(width)
            if n_left > 1:
                for i in (0, 2, 1):
                    table, state = tables[i], states[i]
                    states[i] = table.bases[state] + bits.read(table.n_bits[state])
            self._require(taken + n_literals <= len(literals))
            self.out += literals[taken : taken + n_literals]
            taken += n_literals
            self._copy(self._offset(distance, n_literals), n_copied)
            self._require(len(self.out) - before <= BLOCK)
        bits.check_end()
        self.out += literals[taken:]

    def _choose(self, i: int, mode: int, data: bytes) -> int:
        """Sets the code of literals, offsets or matches; how many bytes describe it."""
        known, most_log, most_symbol = _KNOWN[i]
        n_bytes = 0
        match mode:
            case 0:
                self.tables[i] = known
            case 1:
                self._require(data[0] <= most_symbol)
                self.tables[i], n_bytes = Table(0, data[:1], [0], [0]), 1
            case 2:
                self.tables[i], n_bytes = read_table(data, most_log, most_symbol)
            case 3:
                self._require(self.tables[i] is not None)
        return n_bytes

    def _offset(self, value: int, n_literals: int) -> int:
        """How far back a match lies: said, or one of the last three."""
        recent = self.offsets
        if value > 3:
            self.offsets = [value - 3, *recent[:2]]
            return value - 3
        index = value - 1 + (n_literals == 0)
        offset = recent[index] if index < 3 else recent[0] - 1
        if index:
            self.offsets = [offset, recent[0], recent[2 if index == 1 else 1]]
        return offset

    def _copy(self, offset: int, count: int) -> None:
        self._require(0 < offset <= len(self.out))
        start = len(self.out) - offset
        part = self.out[start : start + count]
        while len(part) < count:
            part += part[: count - len(part)]
        self.out += part

    def _require(self, condition: bool) -> None:
        if not condition:
            raise Damaged("a block of a Zstandard frame is damaged")
