"""npz files of NumPy."""

import zipfile

import numpy as np
import pytest
from weight_files import ARRAYS, assert_holds

from flaxfit.importers import UnreadableFile, load, load_npz


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_files_are_read(tmp_path, save):
    arrays = ARRAYS | {"fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3))}
    save(tmp_path / "weights.npz", **arrays)
    assert_holds(load_npz(tmp_path / "weights.npz"), arrays)
    assert_holds(load(tmp_path / "weights.npz"), arrays)


def test_objects_and_text_in_npz_files_are_refused(tmp_path):
    for value in (np.array([{}], object), np.array(["text"])):
        np.savez(tmp_path / "weights.npz", fine=np.ones(1), wrong=value)
        with pytest.raises(UnreadableFile, match="not numeric"):
            load_npz(tmp_path / "weights.npz")


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
@pytest.mark.parametrize("name", ["w.npy", "w"])
def test_two_arrays_of_one_name_are_refused(tmp_path, name):
    path = tmp_path / "weights.npz"
    np.savez(path, w=np.ones(1), v=np.zeros(1))
    with zipfile.ZipFile(path, "a") as archive:
        with archive.open("v.npy") as file:
            content = file.read()
        archive.writestr(zipfile.ZipInfo(name), content)
    with pytest.raises(UnreadableFile, match="several arrays of one name"):
        load_npz(path)
