"""T5X checkpoints, old and new, and their Zarr stores."""

import json

import ml_dtypes
import numpy as np
import pytest
from flax import serialization
from weight_files import ARRAYS, assert_holds, write_zarr

from flaxfit.importers import UnreadableFile, load, load_t5x

pytest.importorskip("tensorstore", reason="tensorstore is not installed")


def zarr_store(folder, name, array):
    """Writes an array as T5X does; returns what its index says about it."""
    write_zarr(folder / name, array, compressor={"id": "gzip", "level": 1})
    return {"driver": "zarr", "kvstore": {"driver": "gfile", "path": f"/elsewhere/{name}"}}


def t5x_folder(folder, *, old):
    kernel = ARRAYS["body/kernel"].astype(ml_dtypes.bfloat16)
    target = {
        "kernel": zarr_store(folder, "target.kernel", kernel.view(np.uint16) if old else kernel),
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
