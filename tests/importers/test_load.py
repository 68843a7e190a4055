"""Which reader opens a path."""

import pytest

from flaxfit.importers import (
    UnreadableFile,
    load,
    load_msgpack,
    load_npz,
    load_orbax,
    load_safetensors,
    load_t5x,
)


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


@pytest.mark.parametrize("name", ["m.h5", "m.weights.h5", "m.keras"])
def test_a_name_of_hdf5_is_answered_with_safetensors(tmp_path, name):
    advice = r"a name of HDF5: weights are saved as safetensors, such as m\.safetensors"
    with pytest.raises(FileNotFoundError, match=advice):
        load(tmp_path / name)
    (tmp_path / name).write_bytes(b"\x89HDF")
    with pytest.raises(UnreadableFile, match=advice):
        load(tmp_path / name)
