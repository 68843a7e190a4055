"""Every changed or missing file is found and named."""

import shutil

import numpy as np
import pytest
from checkpoint_files import SMALL, all_files, fill

from flaxfit.checkpoints import _seal, restore


def test_a_file_that_the_disk_does_not_give_is_damage(tmp_path, monkeypatch, capfd):
    fill(tmp_path, 1, 2)
    digest = _seal.hashlib.file_digest

    def failing(file, kind):
        if "/2/" in file.name and "manifest" in file.name:
            raise OSError(5, "Input/output error", file.name)
        return digest(file, kind)

    monkeypatch.setattr(_seal.hashlib, "file_digest", failing)
    assert int(restore(tmp_path, SMALL).step) == 1
    assert "its files cannot be read (Input/output error" in capfd.readouterr().err


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
