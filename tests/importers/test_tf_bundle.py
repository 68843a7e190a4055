"""TensorFlow's checkpoints: kept ones, fresh ones, and damaged ones."""

import asyncio
import shutil
import sys

import numpy as np
import pytest
from weight_files import assert_holds

from flaxfit.importers import UnreadableFile, load_tf_ckpt

pytestmark = pytest.mark.usefixtures("tensorflow")

INDEX = "model.ckpt-1000.index"
DATA = "model.ckpt-1000.data-00000-of-00002"


@pytest.mark.parametrize("name", ["small_t5", "partitioned", "dtypes"])
def test_a_kept_checkpoint_is_read_exactly(kept, truth, name):
    assert_holds(load_tf_ckpt(kept / name), truth[name]())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["small_t5", "bfloat16", "per_layer", "factored", "decoder_only", "dtypes", "partitioned"],
)
def test_what_tensorflow_writes_is_read_exactly(written, truth, name):
    assert_holds(load_tf_ckpt(written / name), truth[name]())


def test_arrays_can_be_read_at_the_same_time(kept, truth):
    async def read_all():
        return await asyncio.gather(*(array.get_async() for array in arrays.values()))

    arrays = load_tf_ckpt(kept / "small_t5")
    for name, array in zip(arrays, asyncio.run(read_all()), strict=True):
        np.testing.assert_array_equal(array, truth["small_t5"]()[name])


@pytest.mark.parametrize("name", ["model.ckpt-1000", INDEX, DATA])
def test_a_prefix_or_any_of_its_files_names_the_checkpoint(kept, name):
    assert "global_step" in load_tf_ckpt(kept / "small_t5" / name)
    assert "global_step" in load_tf_ckpt(str(kept / "small_t5" / name))


def test_a_copied_folder_is_read_even_where_the_original_still_exists(kept, tmp_path):
    original, copy = tmp_path / "original", tmp_path / "copy"
    shutil.copytree(kept / "small_t5", original)
    text = f'model_checkpoint_path: "{original}/model.ckpt-1000"\n'
    (original / "checkpoint").write_text(text)
    shutil.copytree(original, copy)
    damage(original / DATA, 0)
    assert load_tf_ckpt(copy)["global_step"].get() == 1000


def test_a_folder_without_a_checkpoint_file_is_read_if_there_is_no_choice(kept, tmp_path):
    folder = shutil.copytree(kept / "small_t5", tmp_path / "copy")
    (folder / "checkpoint").unlink()
    assert "global_step" in load_tf_ckpt(folder)
    shutil.copy(folder / INDEX, folder / "model.ckpt-2000.index")
    with pytest.raises(FileNotFoundError, match="one of these: model.ckpt-1000, model.ckpt-2000"):
        load_tf_ckpt(folder)


def test_a_missing_checkpoint_is_an_error_that_says_what_was_expected(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a folder, or a prefix"):
        load_tf_ckpt(tmp_path / "model.ckpt-1")
    with pytest.raises(FileNotFoundError, match="There is no checkpoint in the folder"):
        load_tf_ckpt(tmp_path)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "../../etc/model"')
    with pytest.raises(FileNotFoundError, match="model.index"):
        load_tf_ckpt(tmp_path)


def damage(path, position, bits=1):
    content = bytearray(path.read_bytes())
    content[position] ^= bits
    path.write_bytes(content)


def test_a_changed_bit_in_the_data_is_found(kept, tmp_path):
    folder = shutil.copytree(kept / "small_t5", tmp_path / "copy")
    for data in folder.glob("*.data-*"):
        damage(data, data.stat().st_size // 2)
    arrays = load_tf_ckpt(folder)
    failures = 0
    for array in arrays.values():
        try:
            array.get()
        except UnreadableFile as error:
            assert "Checksum" in str(error)
            failures += 1
    assert failures == 2


def test_a_data_file_that_is_cut_short_is_found(kept, tmp_path):
    folder = shutil.copytree(kept / "small_t5", tmp_path / "copy")
    (folder / DATA).write_bytes((folder / DATA).read_bytes()[:-1])
    arrays = load_tf_ckpt(folder)
    with pytest.raises(UnreadableFile, match="Read less bytes"):
        for array in arrays.values():
            array.get()


@pytest.mark.parametrize("size", [0, 7, 47, 48, 500, 4000])
def test_an_index_that_is_cut_short_is_unreadable(kept, tmp_path, size):
    folder = shutil.copytree(kept / "small_t5", tmp_path / "copy")
    (folder / INDEX).write_bytes((folder / INDEX).read_bytes()[:size])
    with pytest.raises(UnreadableFile, match="TensorFlow checkpoint"):
        load_tf_ckpt(folder)


def test_an_array_larger_than_its_files_is_not_allocated(kept, tmp_path):
    folder = shutil.copytree(kept / "partitioned", tmp_path / "copy")
    (folder / "model.ckpt-1000.data-00000-of-00001").write_bytes(bytes(4))
    arrays = load_tf_ckpt(folder)
    with pytest.raises(UnreadableFile, match=r"rows of .* its data files are missing or cut short"):
        arrays["rows"].get()


def test_a_prefix_is_no_folder_and_no_pattern(kept, tmp_path):
    folder = shutil.copytree(kept / "partitioned", tmp_path / "copy")
    (folder / "model.ckpt-1000").mkdir()
    assert load_tf_ckpt(folder / "model.ckpt-1000.index")["rows"].get().shape == (100, 2)
    with pytest.raises(UnreadableFile, match="for a pattern. Rename the file or folder"):
        load_tf_ckpt(shutil.copytree(kept / "partitioned", tmp_path / "lr=[0.1]"))


def test_what_is_missing_is_named_where_tensorflow_is_not_installed(kept, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match=r'pip install "flaxfit\[tensorflow\]"'):
        load_tf_ckpt(kept / "small_t5")
