"""Steps in a folder: complete or absent, set aside rather than lost."""

import os
import shutil

import pytest
from checkpoint_files import SMALL, fill, make_checkpoint, small_state
from loops import assert_identical

from flaxfit.checkpoints import CheckpointFileWriter, _folder, list_steps, restore, save


def test_a_relative_folder_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with CheckpointFileWriter("runs/first") as writer:
        monkeypatch.chdir("/")
        writer(make_checkpoint(2))
    assert list_steps(tmp_path / "runs" / "first") == [2]


@pytest.mark.parametrize("name", ["{epoch}", "model-{epoch:02d}-{val_loss:.2f}.keras"])
def test_a_name_by_template_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"cannot be a template, got \{epoch"):
        CheckpointFileWriter(tmp_path / name)


def test_an_interrupted_replacement_is_taken_back(tmp_path):
    fill(tmp_path, 5)
    (tmp_path / "5").rename(tmp_path / "replaced-5-0")
    CheckpointFileWriter(tmp_path)
    assert_identical(restore(tmp_path, SMALL), small_state(5))


def test_left_over_folders_of_a_killed_save_are_removed_and_others_are_not(tmp_path):
    for name in ("saving-7-0", "saving-8-1", "deleted-3-0"):
        (tmp_path / name / "arrays").mkdir(parents=True)
    (tmp_path / "saving-notes").mkdir()
    (tmp_path / "9").mkdir()
    CheckpointFileWriter(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["9", "saving-notes"]


def test_everything_of_a_step_is_synced_before_it_gets_its_name_and_the_name_after(
    tmp_path, monkeypatch
):
    fsync, synced = os.fsync, []

    def record(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        assert (tmp_path / "3").exists() == (synced[-1] == tmp_path.stat().st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    save(tmp_path, make_checkpoint(3))
    paths = [tmp_path, tmp_path / "3", *(tmp_path / "3").rglob("*")]
    assert set(synced) == {path.stat().st_ino for path in paths}


def test_a_foreign_folder_of_the_name_of_a_step_is_moved_not_lost(tmp_path):
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "thesis.txt").write_text("of the user")
    save(tmp_path, make_checkpoint(3))
    CheckpointFileWriter(tmp_path)
    assert list_steps(tmp_path) == [3]
    assert (tmp_path / "foreign-3-0" / "thesis.txt").read_text() == "of the user"


def test_a_place_that_was_removed_is_not_used_again(tmp_path):
    first = _folder.begin(tmp_path, 5)
    shutil.rmtree(first)
    assert _folder.begin(tmp_path, 5) != first
