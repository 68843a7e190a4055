"""Reads safetensors, npz, MessagePack, T5X and Orbax files as their own libraries write them."""

import gc
import json
import tracemalloc
from importlib.util import find_spec

import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import pytest
from flax import serialization

from flaxfit.importers import (
    LazyArray,
    UnreadableFile,
    load,
    load_msgpack,
    load_npz,
    load_orbax,
    load_safetensors,
    load_t5x,
)

tensorstore = pytest.importorskip("tensorstore", reason="tensorstore is not installed")
ARRAYS = {
    "body/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "body/bias": np.arange(3).astype(ml_dtypes.bfloat16),
    "count": np.array(7, np.int64),
    "empty": np.zeros((0, 4), np.float16),
    "mask": np.array([True, False]),
}


def assert_holds(found, expected=ARRAYS):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert isinstance(found[name], LazyArray)
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
        np.testing.assert_array_equal(found[name].get(), value)


def nested(arrays):
    tree = {}
    for name, value in arrays.items():
        *parents, last = name.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return tree


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


def test_weights_that_checkpoints_saves_are_read(tmp_path):
    from flaxfit import checkpoints

    tree = {"params": {"w": jnp.arange(4.0), "b": jnp.ones(2, jnp.bfloat16)}}
    checkpoints.save_weights(tmp_path / "w.safetensors", tree["params"])
    found = load(tmp_path / "w.safetensors")
    np.testing.assert_array_equal(found["w"].get(), np.arange(4.0))


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


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_files_are_read(tmp_path, save):
    arrays = ARRAYS | {"fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3))}
    save(tmp_path / "weights.npz", **arrays)
    assert_holds(load_npz(tmp_path / "weights.npz"), arrays)
    assert_holds(load(tmp_path / "weights.npz"), arrays)


def test_objects_and_text_in_npz_files_are_refused(tmp_path):
    for value in (np.array([{}], object), np.array(["text"])):
        np.savez(tmp_path / "weights.npz", fine=np.ones(1), wrong=value)
        with pytest.raises(UnreadableFile, match="not of numbers"):
            load_npz(tmp_path / "weights.npz")


def test_flax_files_are_read(tmp_path):
    tree = nested(ARRAYS) | {"n": 3, "lr": 0.5, "on": True, "none": None, "name": "text"}
    tree["items"] = [np.float32(2), -70000, 2**40, 1 + 2j]
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
        (b"\x81\xa1a\xc4\x01\x01", "'bytes8', which is not of numbers"),
        (b"\x81\xa1a\xd4\x05\x01", "not of numbers"),
        (flax_array([2], "float32", 4), DAMAGED),
        (flax_array([10**9, 10**9], "float32", 4), DAMAGED),
        (flax_array([1], "S4", 4), "'bytes32', which is not of numbers"),
        (flax_array([1], "object", 8), DAMAGED),
    ],
)
def test_impossible_flax_files_are_refused(tmp_path, content, words):
    (tmp_path / "w.msgpack").write_bytes(content)
    with pytest.raises(UnreadableFile, match=words):
        load_msgpack(tmp_path / "w.msgpack")


def zarr_store(folder, name, array, dtype=None):
    """Writes an array as T5X does; returns what its index says about it."""
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(folder / name)},
        "metadata": {"shape": list(array.shape), "compressor": {"id": "gzip", "level": 1}},
        "dtype": dtype or str(array.dtype),
    }
    tensorstore.open(spec, create=True, open=True).result().write(array).result()
    return {"driver": "zarr", "kvstore": {"driver": "gfile", "path": f"/elsewhere/{name}"}}


def t5x_folder(folder, *, old):
    kernel = ARRAYS["body/kernel"].astype(ml_dtypes.bfloat16)
    target = {
        "kernel": zarr_store(folder, "target.kernel", kernel.view(np.uint16))
        if old
        else zarr_store(folder, "target.kernel", kernel),
        "zeros": zarr_store(folder, "target.zeros", np.zeros((5, 2), np.float32)),
        "scale": np.ones(3, np.float32),
    }
    states = {"kernel": {"v": np.full(1, 2.0, np.float32)}}
    tree = {"target": target, "state": {"step": np.int32(9), "param_states": states}}
    tree = {"version": 2, "optimizer": tree} if old else {"version": 3} | tree
    (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(tree))
    return {
        "target/kernel": kernel,
        "target/zeros": np.zeros((5, 2), np.float32),
        "target/scale": np.ones(3, np.float32),
        "state/step": np.array(9, np.int32),
        "state/param_states/kernel/v": np.full(1, 2.0, np.float32),
    }


@pytest.mark.parametrize("old", [True, False])
def test_t5x_folders_old_and_new_are_read_wherever_they_were_copied_to(tmp_path, old):
    expected = t5x_folder(tmp_path, old=old)
    assert_holds(load_t5x(tmp_path), expected)
    assert_holds(load(tmp_path), expected)


def test_a_t5x_checkpoint_in_one_file_is_read(tmp_path):
    tree = {"optimizer": {"target": {"w": np.arange(3).astype(np.uint16)}}, "version": 3}
    (tmp_path / "t5.checkpoint_0").write_bytes(serialization.msgpack_serialize(tree))
    found = load_t5x(tmp_path / "t5.checkpoint_0")
    np.testing.assert_array_equal(
        found["target/w"].get(), np.arange(3).astype(np.uint16).view(ml_dtypes.bfloat16)
    )


def test_placeholders_of_t5x_name_folders(tmp_path):
    zarr_store(tmp_path, "target.w", ARRAYS["body/kernel"])
    tree = {"target": {"w": "PLACEHOLDER://target.w"}}
    (tmp_path / "checkpoint").write_bytes(serialization.msgpack_serialize(tree))
    assert_holds(load_t5x(tmp_path), {"target/w": ARRAYS["body/kernel"]})
    tree = {"target": {"w": "PLACEHOLDER://../../etc"}}
    (tmp_path / "checkpoint").write_bytes(serialization.msgpack_serialize(tree))
    with pytest.raises(UnreadableFile, match="outside of the folder"):
        load_t5x(tmp_path)


def test_stores_that_state_impossible_sizes_are_refused(tmp_path):
    t5x_folder(tmp_path, old=False)
    zarray = tmp_path / "target.zeros" / ".zarray"
    metadata = json.loads(zarray.read_text())
    for changes in (
        {"shape": [10**6, 10**6]},
        {"shape": [10**7, 1], "chunks": [1, 1]},
        {"chunks": [10**6, 10**6]},
    ):
        zarray.write_text(json.dumps(metadata | changes))
        with pytest.raises(UnreadableFile, match="impossible"):
            load_t5x(tmp_path)
    zarray.unlink()
    with pytest.raises(UnreadableFile, match="T5X checkpoint"):
        load_t5x(tmp_path)


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}, {"use_zarr3": True}])
def test_orbax_folders_are_read_without_their_tree(tmp_path, options):
    ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")
    arrays = {name: value for name, value in ARRAYS.items() if value.size}
    tree = nested(arrays) | {"n": 3, "name": "text", "none": None, "empty": {}}
    tree["pair"] = (jnp.arange(4.0), [np.ones(2, np.uint16)])
    folder = tmp_path / "step" / "default"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(tree))
    expected = arrays | {
        "n": np.array(3),
        "pair/0": np.arange(4, dtype=np.float32),
        "pair/1/0": np.ones(2, np.uint16),
    }
    for path in (folder, folder.parent):
        assert_holds(load_orbax(path), expected)
        assert_holds(load(path), expected)


def test_a_checkpoint_of_flaxfit_is_read_by_the_paths_of_its_state(tmp_path):
    import optax

    import flaxfit as ff

    variables = {"params": {"w": jnp.arange(3.0)}}
    state = ff.TrainState.create(optax.adam(0.1), variables)
    ff.checkpoints.save(tmp_path / "run", state)
    (step,) = [path for path in (tmp_path / "run").iterdir() if path.is_dir()]
    np.testing.assert_array_equal(load(step)["params/w"].get(), np.arange(3.0))


@pytest.mark.parametrize(
    "reader", [load, load_safetensors, load_npz, load_msgpack, load_t5x, load_orbax]
)
def test_what_is_not_there_is_a_file_not_found_error(tmp_path, reader):
    with pytest.raises(FileNotFoundError):
        reader(tmp_path / "nothing.npz")


def test_a_file_of_unknown_kind_or_none_is_told_from_a_damaged_one(tmp_path):
    other = tmp_path / "weights.bin"
    other.write_bytes(b"weights")
    with pytest.raises(UnreadableFile, match=r"what .*weights.bin holds: files are called .safete"):
        load(other)
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint .*weights.npz"):
        load(tmp_path / "weights.npz")
