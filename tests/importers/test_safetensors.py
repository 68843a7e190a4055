"""safetensors files: written by hand, by their own library and by `save_weights`."""

import gc
import json
import tracemalloc
from importlib.util import find_spec

import jax.numpy as jnp
import numpy as np
import pytest
from weight_files import ARRAYS, assert_holds

from flaxfit.importers import UnreadableFile, load, load_safetensors


def safetensors_bytes(arrays, **changes):
    """The format from its definition, in a few lines."""
    codes = {"float32": "F32", "bfloat16": "BF16", "int64": "I64", "float16": "F16", "bool": "BOOL"}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, value in arrays.items():
        content = np.ascontiguousarray(value).tobytes()
        header[name] = {
            "dtype": codes[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        } | changes
        data += content
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_safetensors_are_read(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(ARRAYS))
    for place in (path, str(path), tmp_path):
        assert_holds(load_safetensors(place))
        assert_holds(load(place))


@pytest.mark.skipif(find_spec("safetensors") is None, reason="safetensors is not installed")
def test_what_the_safetensors_package_writes_is_read(tmp_path):
    from safetensors.flax import save_file

    arrays = {name: jnp.asarray(value) for name, value in ARRAYS.items() if value.size}
    save_file(arrays, tmp_path / "model.safetensors")
    expected = {name: np.asarray(value) for name, value in arrays.items()}
    assert_holds(load_safetensors(tmp_path), expected)


def test_safetensors_in_several_files_are_read_through_their_index(tmp_path):
    names = list(ARRAYS)
    shards = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for file, part in shards.items():
        (tmp_path / file).write_bytes(safetensors_bytes({n: ARRAYS[n] for n in part}))
    files = {name: file for file, part in shards.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert_holds(load_safetensors(tmp_path))
    assert_holds(load(index))
    for wrong, words in [
        ({"x": "../a.safetensors"}, "files elsewhere"),
        ({"x": "c.safetensors"}, "c.safetensors is missing"),
        ({"x": "a.safetensors"}, "KeyError"),
        ({"x": 3}, "not an index"),
    ]:
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(UnreadableFile, match=words):
            load_safetensors(tmp_path)


@pytest.mark.slow
def test_a_mapped_file_takes_no_memory_until_it_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({"large": np.zeros((1 << 22,), np.float32)}))
    gc.collect()
    tracemalloc.start()
    lazy = load_safetensors(path)["large"]
    array = lazy.get()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert array.nbytes == 1 << 24
    assert peak < 1 << 20
    assert not array.flags.writeable


ONE, EMPTY = {"one": np.ones(1, np.float32)}, {"empty": np.zeros(0, np.float32)}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"\xff" * 8, "header is longer than the file"),
        ((10**12).to_bytes(8, "little") + b"{}", "header is longer than the file"),
        (b"\x02" + bytes(7) + b"[]", "is not an object"),
        (b"\x0f" + bytes(7) + b'{"a":{},"a":{}}', "a name occurs twice"),
        (safetensors_bytes(ARRAYS, shape=[10**9, 10**9]), "entry for 'body/kernel' is invalid"),
        (safetensors_bytes(ARRAYS, shape=[-1, -6]), "entry for 'body/kernel' is invalid"),
        (safetensors_bytes(EMPTY, shape=[0, 1 << 70]), "an array of shape"),
        (safetensors_bytes(EMPTY, shape=[0] * 65), "an array of shape"),
        (safetensors_bytes(ONE, data_offsets=[4, 8]), "overlap or leave a gap at byte 0"),
        (safetensors_bytes(ONE, shape=[2**40], data_offsets=[0, 2**42]), "has 4"),
        (safetensors_bytes(ONE) + b"more", "take 4 bytes, but it has 8"),
        (safetensors_bytes(ARRAYS, data_offsets=[9, 3]), "entry for 'body/kernel' is invalid"),
        (safetensors_bytes(ARRAYS, dtype="O"), "entry for 'body/kernel' is invalid or unsupported"),
    ],
)
def test_impossible_safetensors_are_refused(tmp_path, content, words):
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(UnreadableFile, match=words):
        load_safetensors(tmp_path / "m.safetensors")
