"""CRC-32C, against the definition and known values."""

import numpy as np
import pytest

from flaxfit.importers._crc32c import crc32c


def by_definition(data):
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@pytest.mark.parametrize("size", [*range(9), 1023, 1024, 1025, 3072, 4097, 7000])
def test_any_length_equals_the_definition(size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    assert crc32c(data) == by_definition(data)


def test_known_values_of_the_standard():
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


def test_data_longer_than_a_chunk_equals_its_parts_together(monkeypatch):
    data = np.random.default_rng(0).integers(0, 256, 10_001, np.uint8).tobytes()
    whole = crc32c(data)
    monkeypatch.setattr("flaxfit.importers._crc32c._CHUNK", 2500)
    assert crc32c(data) == whole


def test_arrays_are_taken_as_their_bytes():
    array = np.arange(10, dtype=np.uint8)
    assert crc32c(array) == crc32c(array.tobytes())
