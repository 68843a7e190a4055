"""CRC-32C checksums, which TensorFlow keeps of every tensor, at memory-like speed in NumPy."""

import functools
from typing import Any

import numpy as np

_POLYNOMIAL = 0x82F63B78
_LANE = 1024
"""Bytes that are summed one after the other, at most; all lanes go through at the same time."""
_CHUNK = 1 << 24
"""Bytes that are copied at a time."""


def crc32c(data: Any) -> int:
    """The CRC-32C of bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    array, register = np.frombuffer(data, np.uint8), 0xFFFFFFFF
    for start in range(0, len(array), _CHUNK):
        register = _update(register, array[start : start + _CHUNK])
    return register ^ 0xFFFFFFFF


def _update(register: int, data: np.ndarray) -> int:
    """The register after some more bytes."""
    if len(data) < 4:
        for byte in data.tolist():
            register = int(_byte_table()[(register ^ byte) & 0xFF]) ^ (register >> 8)
        return register
    # A register at work is the same as one of zeros and its bytes mixed into the first of the
    # data; and zeros in front then change nothing: the data can be cut into lanes of one length.
    lane = min(_LANE, max(8, 1 << len(data).bit_length() // 2))
    lanes = np.zeros((-(-len(data) // lane), lane), np.uint8)
    padded = lanes.reshape(-1)[-len(data) :]
    padded[:] = data
    padded[:4] ^= np.frombuffer(register.to_bytes(4, "little"), np.uint8)
    registers, table = np.zeros(len(lanes), np.uint32), _word_table()
    for word in np.ascontiguousarray(lanes.view("<u2").T):
        registers = table[(registers & 0xFFFF) ^ word] ^ (registers >> 16)
    length = lane
    while len(registers) > 1:
        if len(registers) % 2:
            registers = np.concatenate([np.zeros(1, np.uint32), registers])
        registers = _look_up(_zeros_table(length), registers[::2]) ^ registers[1::2]
        length *= 2
    return int(registers[0])


def unmasked(stored: int) -> int:
    """The checksum behind the form in which TensorFlow and LevelDB store it.

    >>> hex(unmasked(0xA282EAD8))
    '0x0'
    """
    rotated = (stored - 0xA282EAD8) & 0xFFFFFFFF
    return ((rotated >> 17) | (rotated << 15)) & 0xFFFFFFFF


@functools.cache
def _byte_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


@functools.cache
def _word_table() -> np.ndarray:
    """What two bytes do to the register."""
    step = _byte_table()
    low = step[np.arange(65536) & 0xFF] ^ (np.arange(65536, dtype=np.uint32) >> 8)
    return step[low & 0xFF] ^ (low >> 8)


@functools.cache
def _zeros_table(length: int) -> np.ndarray:
    """What that many zero bytes do to each of the four bytes of a register."""
    if length == 1:
        values = np.arange(256, dtype=np.uint32) << np.arange(0, 32, 8, dtype=np.uint32)[:, None]
        return _byte_table()[values & 0xFF] ^ (values >> 8)
    half = _zeros_table(length // 2)
    return _look_up(half, half)


def _look_up(table: np.ndarray, registers: np.ndarray) -> np.ndarray:
    parts = [table[i][(registers >> (8 * i)) & 0xFF] for i in range(4)]
    return parts[0] ^ parts[1] ^ parts[2] ^ parts[3]
