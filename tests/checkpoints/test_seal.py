"""Every changed or missing file is found and named."""

import hashlib
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import SMALL, all_files, fill, save_losses

from flaxfit.checkpoints import _orbax, _seal, list_steps, restore


def failing_on(real, place, name_of=str):
    def fail(path=".", *arguments, **options):
        if re.search(place, name_of(path)):
            raise OSError(5, "Input/output error", name_of(path))
        return real(path, *arguments, **options)

    return fail


def tensorstore_fails(*arguments):
    raise ValueError("Error reading local file: Input/output error [os_error_code='5']")


@pytest.mark.parametrize(
    ("module", "function", "failing"),
    [
        (os, "scandir", failing_on(os.scandir, "/2/arrays")),
        (os, "scandir", failing_on(os.scandir, "/2/record")),
        (Path, "read_text", failing_on(Path.read_text, "/2/seal.json")),
        (_seal.hashlib, "file_digest", failing_on(hashlib.file_digest, "/2/", lambda f: f.name)),
        (_orbax, "_check_layout", tensorstore_fails),
    ],
    ids=["list arrays", "list record", "seal", "files", "tensorstore"],
)
def test_a_step_that_the_disk_does_not_give_stays_and_no_older_one_is_read(
    tmp_path, monkeypatch, module, function, failing
):
    save_losses(tmp_path, [0.5, 0.4], monitor="val_loss")
    for which in ("latest", "best", 2):
        with monkeypatch.context() as broken:
            broken.setattr(module, function, failing)
            with pytest.raises(OSError, match=r"Cannot read a checkpoint \(Input/.*/2'$") as error:
                restore(tmp_path, SMALL, which=which)
        assert error.value.errno == 5
        assert list_steps(tmp_path) == [1, 2]
        assert int(restore(tmp_path, SMALL, which=which).step) == 2


def test_a_best_step_that_the_disk_does_not_give_is_not_deleted(tmp_path, monkeypatch):
    with monkeypatch.context() as broken, pytest.raises(OSError, match="Cannot read a checkpoint"):
        save_losses(tmp_path, [0.5], keep=1, monitor="val_loss")
        broken.setattr(os, "scandir", failing_on(os.scandir, "/1/record"))
        save_losses(tmp_path, [0.6], first=2, keep=1, monitor="val_loss")
    assert list_steps(tmp_path) == [1, 2]


def test_a_folder_that_cannot_be_listed_is_not_sealed_without_its_files(tmp_path, monkeypatch):
    with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="Input/output error"):
        broken.setattr(os, "scandir", failing_on(os.scandir, r"saving-\d+-\d+/arrays/d$"))
        fill(tmp_path, 1)
    assert list_steps(tmp_path) == []


def test_a_flipped_bit_in_any_file_is_detected_and_the_file_named(tmp_path):
    fill(tmp_path, 1)
    rng = np.random.default_rng(0)
    for file in all_files(tmp_path / "1"):
        content = file.read_bytes()
        for bit in rng.integers(8 * len(content), size=8):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match="1 is damaged: its ") as error:
                restore(tmp_path, SMALL, which=1)
            assert file.name == "seal.json" or file.name in str(error.value)
        file.write_bytes(content)
    assert int(restore(tmp_path, SMALL, which=1).step) == 1


def test_a_missing_file_is_detected_and_named(tmp_path):
    fill(tmp_path, 1)
    for file in all_files(tmp_path / "1"):
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(ValueError, match=f"1 is damaged: its .*{file.name} is missing"):
            restore(tmp_path, SMALL, which=1)
        file.write_bytes(content)


def test_arrays_that_are_intact_files_of_another_content_are_detected(tmp_path):
    fill(tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "1" / "arrays")
    shutil.copytree(tmp_path / "2" / "arrays", tmp_path / "1" / "arrays")
    _seal.write(tmp_path / "1")
    with pytest.raises(ValueError, match="1 is damaged: the content of .* was changed"):
        restore(tmp_path, SMALL, which=1)
