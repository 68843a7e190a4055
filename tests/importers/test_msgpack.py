"""MessagePack files of Flax."""

import msgpack
import numpy as np
import pytest
from flax import serialization
from flax.traverse_util import unflatten_dict
from weight_files import ARRAYS, assert_holds

from flaxfit.importers import UnreadableFile, load, load_msgpack


def test_flax_files_are_read(tmp_path):
    tree = unflatten_dict(ARRAYS, sep="/") | {"n": 3, "lr": 0.5, "on": True, "none": None}
    tree |= {"name": "text", "items": [np.float32(2), -70000, 2**40, 1 + 2j]}
    (tmp_path / "w.msgpack").write_bytes(serialization.to_bytes(tree))
    expected = ARRAYS | {
        "n": np.array(3),
        "lr": np.array(0.5),
        "on": np.array(True),
        "items/0": np.array(2, np.float32),
        "items/1": np.array(-70000),
        "items/2": np.array(2**40),
        "items/3": np.array(1 + 2j),
    }
    assert_holds(load_msgpack(tmp_path / "w.msgpack"), expected)
    assert_holds(load(tmp_path / "w.msgpack"), expected)


def test_large_arrays_that_flax_cuts_into_chunks_are_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 100)
    large = {"a": np.arange(1000, dtype=np.float32).reshape(10, 100)}
    (tmp_path / "w.msgpack").write_bytes(serialization.to_bytes(large))
    assert b"chunked" in (tmp_path / "w.msgpack").read_bytes()
    assert_holds(load_msgpack(tmp_path / "w.msgpack"), large)


DAMAGED = r"damaged \((ValueError|ExtraData)"


def flax_array(shape, dtype, n_bytes):
    """A file of Flax whose only array states any shape and dtype."""
    array = msgpack.ExtType(1, msgpack.packb((shape, dtype, bytes(n_bytes))))
    return msgpack.packb({"a": array})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", DAMAGED),
        (b"\x93\x01\x02\x03", "it is not a dict"),
        (b"\xdf\xff\xff\xff\xff", DAMAGED),
        (b"\x81\xa1a\xdd\xff\xff\xff\xff", DAMAGED),
        (b"\x81\xa1a\xc6\xff\xff\xff\xff", DAMAGED),
        (b"\x81\xa1a\xc1", "FormatError"),
        (b"\x81\xa1a" + b"\x91" * 2000 + b"\x01", "StackError"),
        (b"\x81\xa1a" + b"\x91" * 1000 + b"\x01", "RecursionError"),
        (b"\x82\xa3a/b\x01\xa1a\x81\xa1b\x02", "the name a/b occurs twice"),
        (b"\x81\xc0\x01", "it has the key None"),
        (b"\x81\xa1a\x01\x01", DAMAGED),
        (b"\x81\xa1a\xc4\x01\x01", "'bytes8', which is not numeric"),
        (b"\x81\xa1a\xd4\x05\x01", "not numeric"),
        (flax_array([2], "float32", 4), DAMAGED),
        (flax_array([10**9, 10**9], "float32", 4), DAMAGED),
        (flax_array([1], "S4", 4), "'bytes32', which is not numeric"),
        (flax_array([1], "object", 8), DAMAGED),
    ],
)
def test_impossible_flax_files_are_refused(tmp_path, content, words):
    (tmp_path / "w.msgpack").write_bytes(content)
    with pytest.raises(UnreadableFile, match=words):
        load_msgpack(tmp_path / "w.msgpack")
