"""The codes of Zstandard: streams of bits, finite state entropy, Huffman."""

from collections.abc import Sequence
from typing import NamedTuple


class Damaged(ValueError):
    """A frame is not what the format says, or needs a dictionary."""


class Bits:
    """Bits that are read from the last one to the first, as the format has them."""

    def __init__(self, data: bytes) -> None:
        if not data or not data[-1]:
            raise Damaged("a stream of bits has no end")
        self.data = bytes(8) + data  # What is read beyond the first bit is zero.
        self.left = 8 * len(data) - 9 + data[-1].bit_length()

    def peek(self, n: int) -> int:
        at = self.left - n + 64
        if at < 0:
            raise Damaged("a stream of bits is too short")
        return int.from_bytes(self.data[at >> 3 : (at >> 3) + 8], "little") >> (at & 7) & (
            (1 << n) - 1
        )

    def read(self, n: int) -> int:
        value = self.peek(n)
        self.left -= n
        return value

    def check_end(self) -> None:
        if self.left:
            raise Damaged("a stream of bits is not as long as it should be")


class Table(NamedTuple):
    """A finite state entropy code: of every state its symbol, and how the next one is found."""

    log: int
    symbols: Sequence[int]
    n_bits: Sequence[int]
    bases: Sequence[int]


def table_of(counts: Sequence[int], log: int) -> Table:
    size = 1 << log
    symbols, high = [0] * size, size
    following = [max(count, 1) for count in counts]
    for symbol, count in enumerate(counts):
        if count == -1:
            high -= 1
            symbols[high] = symbol
    position, step = 0, (size >> 1) + (size >> 3) + 3
    for symbol, count in enumerate(counts):
        for _ in range(count):
            symbols[position] = symbol
            position = (position + step) % size
            while position >= high:
                position = (position + step) % size
    n_bits, bases = [], []
    for symbol in symbols:
        state = following[symbol]
        following[symbol] += 1
        n_bits.append(log + 1 - state.bit_length())
        bases.append((state << n_bits[-1]) - size)
    return Table(log, symbols, n_bits, bases)


def read_table(data: bytes, most_log: int, most_symbol: int) -> tuple[Table, int]:
    """A described code, and how many bytes the description takes."""
    bits, at = int.from_bytes(data[:256], "little"), 4
    log = (bits & 15) + 5
    if log > most_log:
        raise Damaged("a code is too fine")
    counts, remaining = [], 1 << log
    while remaining > 0:
        width = (remaining + 1).bit_length()
        value, low = bits >> at & ((1 << width) - 1), (1 << (width - 1)) - 1
        short = (1 << width) - 2 - remaining
        at += width
        if value & low < short:
            at, value = at - 1, value & low
        elif value > low:
            value -= short
        counts.append(value - 1)
        remaining -= abs(value - 1)
        while value == 1:
            zeros = bits >> at & 3
            at += 2
            counts += [0] * zeros
            if zeros < 3 or len(counts) > most_symbol:
                break
        if len(counts) > most_symbol + 1:
            raise Damaged("a code has too many symbols")
    n_bytes = -(-at // 8)
    if remaining or n_bytes > len(data):
        raise Damaged("the description of a code is damaged")
    return table_of(counts, log), n_bytes


def read_huffman(data: bytes) -> tuple[list[tuple[int, int]], int]:
    """A Huffman code, symbol and bits by what the next bits are; and the bytes that describe it."""
    if data[0] < 128:
        n_bytes = 1 + data[0]
        weights = _read_weights(data[1:n_bytes])
    else:
        count = data[0] - 127
        n_bytes = 1 + (count + 1) // 2
        weights = [n for byte in data[1:n_bytes] for n in (byte >> 4, byte & 15)][:count]
    total = sum(1 << weight >> 1 for weight in weights)
    width = total.bit_length()
    rest = (1 << width) - total
    if n_bytes > len(data) or not 0 < width <= 11 or rest & (rest - 1) or len(weights) > 255:
        raise Damaged("a Huffman code is damaged")
    weights.append(rest.bit_length())
    code = []
    for weight in range(1, width + 1):
        for symbol, own in enumerate(weights):
            if own == weight:
                code += [(symbol, width + 1 - weight)] * (1 << weight >> 1)
    return code, n_bytes


def _read_weights(data: bytes) -> list[int]:
    """The weights of a Huffman code, of which two states take turns to tell."""
    table, n_bytes = read_table(data, 6, 255)
    bits, weights = Bits(data[n_bytes:]), []
    states = [bits.read(table.log), bits.read(table.log)]
    while len(weights) < 255:
        turn = len(weights) % 2
        state = states[turn]
        weights.append(table.symbols[state])
        states[turn] = table.bases[state] + bits.read(table.n_bits[state])
        if bits.left < 0:
            return [*weights, table.symbols[states[1 - turn]]]
    raise Damaged("a Huffman code has too many symbols")
