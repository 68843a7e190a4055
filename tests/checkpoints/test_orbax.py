"""Array headers are compared with the record before anything is allocated."""

import asyncio
import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from checkpoint_files import make_checkpoint, rewrite_record, small_state

from flaxfit import Sharded
from flaxfit.checkpoints import CheckpointFileWriter, _orbax, _seal, restore, save

STATE = small_state(1)
HUGE = [10**13]


def open_store(step):
    base = {"driver": "file", "path": f"{step / _orbax.ARRAYS}/"}
    return tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()


@pytest.mark.parametrize("template", [STATE, None], ids=["target", "none"])
def test_a_header_that_disagrees_with_the_record_is_refused_even_if_it_is_sealed(
    tmp_path, template
):
    step = save(tmp_path, STATE)
    store = open_store(step)
    header = json.loads(store["params/w/.zarray"])
    for changes in (
        {"shape": HUGE},
        {"shape": HUGE, "chunks": HUGE},
        {"chunks": HUGE},
        {"chunks": []},
        {"dtype": "<f8"},
        {"compressor": {"id": "zstd", "level": 1}},
        {"filters": []},
    ):
        store["params/w/.zarray"] = json.dumps(header | changes).encode()
        _seal.write(step)
        with pytest.raises(ValueError, match=r"damaged: it has no array params/w of float32 \(4,"):
            restore(tmp_path, template, which=1)


def test_checksums_are_verified_before_anything_opens_the_index(tmp_path, monkeypatch):
    step = save(tmp_path, STATE)
    manifest = step / _orbax.ARRAYS / "manifest.ocdbt"
    manifest.write_bytes(manifest.read_bytes() + b"\0")
    opened = []
    monkeypatch.setattr(tensorstore.KvStore, "open", opened.append)
    with pytest.raises(ValueError, match="damaged: its file arrays/manifest.ocdbt was changed"):
        restore(tmp_path, which=1)
    assert opened == []


def test_arrays_take_the_room_on_disk_that_they_take_in_memory(tmp_path):
    save(tmp_path, STATE.replace(params={"w": jnp.zeros(100_000)}))
    files = (tmp_path / "1" / _orbax.ARRAYS).rglob("*")
    assert 400_000 <= sum(file.stat().st_size for file in files if file.is_file()) < 410_000


@pytest.mark.slow
@pytest.mark.parametrize("width", [100, 128, 256, 300])
@pytest.mark.parametrize("strategy", [None, Sharded.fsdp], ids=["whole", "in parts"])
def test_many_small_arrays_of_zeros_take_less_room_and_are_not_damaged(tmp_path, width, strategy):
    """Orbax stores small values in compressed index nodes."""
    state = STATE.replace(params={str(i): jnp.zeros(width) for i in range(60)})
    state = state if strategy is None else strategy().place(state)
    save(tmp_path, state)
    found = restore(tmp_path, state)
    assert all(not np.any(np.asarray(x)) and x.shape == (width,) for x in found.params.values())


def test_a_chunk_that_is_missing_is_not_read_as_zeros(tmp_path):
    step = save(tmp_path, STATE)
    del open_store(step)["params/w/0"]
    with pytest.raises(_seal.Damaged, match="no array params/w"):
        _orbax.read_arrays(step, {"params/w": jax.ShapeDtypeStruct((4,), jnp.float32)})


def test_another_array_format_is_refused(tmp_path):
    step = save(tmp_path, STATE)
    metadata = step / _orbax.ARRAYS / "_METADATA"
    content = json.loads(metadata.read_text())
    for layout in ({"use_zarr3": True}, {"use_ocdbt": False}, {"use_ocdbt": None}):
        metadata.write_text(json.dumps(content | layout))
        _seal.write(step)
        with pytest.raises(ValueError, match="damaged: its arrays are not in the format"):
            restore(tmp_path, STATE, which=1)


def test_an_array_that_is_not_there_is_named(tmp_path):
    def add_name(record):
        record["arrays"]["params/v"] = record["arrays"]["params/w"]

    rewrite_record(save(tmp_path, STATE), add_name)
    with pytest.raises(ValueError, match=r"damaged: it has no array params/v of float32 \(4,\)"):
        restore(tmp_path, which=1)


def test_names_of_any_kind_are_found_again(tmp_path):
    names = ["a b", "a.b", "ünï", "../c", "#1?q=%20", "a\\b", "", "/d"]
    params = {name: {"w": jnp.full(2, i)} for i, name in enumerate(names)}
    save(tmp_path, STATE.replace(params=params))
    found = restore(tmp_path, STATE.replace(params=params)).params
    assert [found[name]["w"][0].item() for name in names] == list(range(len(names)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_array_with_a_copy_of_its_dtype_is_saved(tmp_path, dtype):
    w = np.ones(4, copy.deepcopy(jnp.dtype(dtype)))
    assert w.dtype == dtype and w.dtype.isbuiltin != 1
    path = save(tmp_path, STATE.replace(params={"w": w}))
    assert restore(path.parent).params["w"].dtype == dtype


def test_a_save_where_an_event_loop_runs_as_in_a_notebook(tmp_path):
    async def cell():
        with CheckpointFileWriter(tmp_path) as writer:
            writer(make_checkpoint(1))

    asyncio.run(cell())
    np.testing.assert_array_equal(restore(tmp_path).params["w"], STATE.params["w"])
