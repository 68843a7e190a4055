"""Zstandard frames of another library unpack to what it packed; damaged ones are refused."""

import json

import numpy as np
import pytest
import tensorstore

from flaxfit.checkpoints._zstd import BLOCK, blocks, unpack
from flaxfit.checkpoints._zstd_codes import Damaged

RNG = np.random.default_rng(0)
SAMPLES = {
    "one byte": b"a",
    "a repeated word": b"word " * 300,
    "zeros in several blocks": bytes(3 * BLOCK + 5),
    "noise": RNG.bytes(3000),
    "few symbols": RNG.integers(0, 3, 5000).astype(np.uint8).tobytes(),
    "skewed symbols": RNG.exponential(8, 20_000).astype(np.uint8).tobytes(),
    "numbers": RNG.normal(size=5000).astype(np.float32).tobytes(),
    "text": json.dumps(
        [{"shape": [int(n)], "name": f"block_{i}/kernel"} for i, n in enumerate(RNG.bytes(3000))]
    ).encode(),
}


def packed(content, level=3):
    """A frame that TensorStore writes: the one chunk of a Zarr array."""
    metadata = {"shape": [len(content)], "chunks": [len(content)], "dtype": "|u1"}
    metadata["compressor"] = {"id": "zstd", "level": level}
    spec = {"driver": "zarr", "kvstore": "memory://", "metadata": metadata}
    array = tensorstore.open({**spec, "store_data_equal_to_fill_value": True}, create=True).result()
    array.write(np.frombuffer(content, np.uint8)).result()
    store = array.kvstore
    assert store is not None
    return store["0"]


def unpacked(frame):
    out = bytearray()
    for _ in unpack(frame, out):
        pass
    return bytes(out)


@pytest.mark.parametrize("level", [-5, 1, 3, 19])
@pytest.mark.parametrize("name", SAMPLES)
def test_what_was_packed_is_unpacked(name, level):
    assert unpacked(packed(SAMPLES[name], level)) == SAMPLES[name]


def test_a_frame_of_nothing_holds_nothing():
    assert unpacked(bytes.fromhex("28b52ffd2000010000")) == b""


def test_no_more_is_unpacked_than_is_asked_for():
    out = bytearray()
    next(unpack(packed(SAMPLES["zeros in several blocks"]), out))
    assert len(out) == BLOCK


def test_the_headers_of_the_blocks_say_how_much_they_unpack_to_at_most():
    for content in SAMPLES.values():
        sizes = [most for *_, most in blocks(packed(content))]
        assert len(content) <= sum(sizes) <= len(content) + BLOCK


@pytest.mark.parametrize("name", ["text", "few symbols", "skewed symbols"])
def test_damage_is_refused_or_gives_other_bytes_and_never_another_error(name):
    rng, frame, n_refused = np.random.default_rng(1), packed(SAMPLES[name][:5000]), 0
    for position in rng.integers(4, len(frame), 60).tolist():
        damaged = bytearray(frame)
        damaged[position] ^= 1 << int(rng.integers(8))
        try:
            assert len(unpacked(bytes(damaged))) <= 8 * BLOCK
        except Damaged:
            n_refused += 1
    assert n_refused > 10


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"something else",
        b"\x28\xb5\x2f\xfd",
        bytes.fromhex("28b52ffd2100010000"),  # It needs a dictionary.
        bytes.fromhex("28b52ffd2800010000"),  # A reserved bit is set.
        bytes.fromhex("28b52ffd2000070000"),  # A block of an unknown kind.
        bytes.fromhex("28b52ffd200003ffff00"),  # A block of more than 128 KB.
        bytes.fromhex("28b52ffd2000000000"),  # No last block.
        bytes.fromhex("28b52ffd20001d000000000000"),  # A compressed block of zeros.
    ],
)
def test_what_is_no_frame_is_refused(frame):
    with pytest.raises(Damaged):
        unpacked(frame)
