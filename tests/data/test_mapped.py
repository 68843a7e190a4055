import sys

import numpy as np
import pytest
from marks import thorough

from flaxfit.data import ArrayStream
from flaxfit.data import _mapped as mapped
from flaxfit.data._fit_arguments import prepare

ROWS, WIDTH = 4000, 512


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.arange(ROWS * WIDTH, dtype=np.float64).reshape(ROWS, WIDTH))
    return path


def resident_kib(path):
    """How much of a mapped file counts as memory of this process."""
    found, total = False, 0
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if "-" in line.split(" ")[0]:
                found = line.rstrip().endswith(str(path))
            elif found and line.startswith("Rss:"):
                total += int(line.split()[1])
    return total


@pytest.mark.parametrize("shuffle", [False, True])
def test_mapped_arrays_are_narrowed_batch_by_batch(file, shuffle):
    x = np.load(file, mmap_mode="r")
    stream = ArrayStream(x, batch_size=64, shuffle=shuffle, epochs=1)
    if sys.platform == "linux":
        assert resident_kib(file) < 1000
    batches = np.concatenate([x for x, _ in stream])
    order = np.random.default_rng((0, 0)).permutation(ROWS) if shuffle else np.arange(ROWS)
    assert batches.dtype == np.float32
    np.testing.assert_array_equal(batches[:, 0], order * WIDTH)


def test_a_split_selects_rows_of_a_mapped_array_without_reading_them(file):
    x, y = np.load(file, mmap_mode="r"), np.arange(ROWS)
    training, validation = prepare(x, y, validation_split=0.25)
    if sys.platform == "linux":
        assert resident_kib(file) < 1000
    for data, n in (training, 3000), (validation, 1000):
        stream = ArrayStream(*data[:2], batch_size=64, shuffle=True)
        rows, numbers = next(stream)
        assert (stream.n_examples, rows.dtype, stream.resident) == (n, np.float32, False)
        np.testing.assert_array_equal(rows, x[numbers])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("shuffle", [thorough(False), True])
def test_pages_that_were_read_are_handed_back(file, shuffle, monkeypatch):
    def read(keep):
        monkeypatch.setattr(mapped, "_KEEP", keep)
        x = np.load(file, mmap_mode="r")
        largest = 0
        for number, _ in enumerate(ArrayStream(x, batch_size=50, shuffle=shuffle, epochs=1)):
            if number % 10 == 9:
                largest = max(largest, resident_kib(file))
        return largest

    whole = file.stat().st_size // 1024
    assert read(keep=2**40) > 0.9 * whole
    assert read(keep=2**20) < 0.6 * whole


def test_private_changes_to_a_mapping_are_kept(file, monkeypatch):
    monkeypatch.setattr(mapped, "_KEEP", 1)
    x = np.load(file, mmap_mode="c")
    x[:] = 1
    for _ in range(2):
        assert all((batch == 1).all() for batch, _ in ArrayStream(x, epochs=1))


def test_views_of_a_mapping_stay_valid_after_its_pages_are_handed_back(file, monkeypatch):
    monkeypatch.setattr(mapped, "_KEEP", 1)
    x = np.load(file, mmap_mode="r").view(np.int32)
    x = np.asarray(x)[3:]  # A mapped file is known through views.
    stream = ArrayStream(x, batch_size=64, epochs=1)
    batches = [x for x, _ in stream]
    assert not stream.resident and np.shares_memory(batches[0], x)
    np.testing.assert_array_equal(np.concatenate(batches), np.load(file).view(np.int32)[3:])
