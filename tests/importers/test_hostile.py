"""Damaged and made-up files: every reader gives arrays or our error, in bounded time and memory."""

import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from damage import mutated
from flax import serialization
from marks import thorough
from weight_files import write_zarr

from flaxfit import checkpoints
from flaxfit.importers import UnreadableFile, load

MOST_MEMORY = 50_000_000
ARRAYS = {
    "body/kernel": np.arange(60, dtype=np.float32).reshape(20, 3),
    "body/bias": np.arange(3),
    "scale": np.ones(5, np.float16),
}


def write_npz(folder):
    np.savez(folder / "w.npz", **ARRAYS)
    return folder / "w.npz"


def write_compressed_npz(folder):
    np.savez_compressed(folder / "w.npz", **ARRAYS)
    return folder / "w.npz"


def write_msgpack(folder):
    tree = ARRAYS | {"step": 3, "list": [1.0, "text", None]}
    (folder / "w.msgpack").write_bytes(serialization.msgpack_serialize(tree))
    return folder / "w.msgpack"


def write_safetensors(folder):
    tree = {name.replace("/", "_"): jnp.asarray(value) for name, value in ARRAYS.items()}
    checkpoints.save_weights(folder / "w.safetensors", tree)
    return folder / "w.safetensors"


def write_tf(folder, name="small_t5"):
    pytest.importorskip("tensorflow", reason="tensorflow is not installed")
    return shutil.copytree(Path(__file__).parent / "fixtures" / name, folder / "tf")


def write_partitioned_tf(folder):
    return write_tf(folder, "partitioned")


def write_t5x(folder):
    pytest.importorskip("tensorstore", reason="tensorstore is not installed")
    kernel, compressor = ARRAYS["body/kernel"], {"id": "gzip", "level": 1}
    write_zarr(folder / "t5x" / "target.w", kernel, compressor=compressor)
    array = {"driver": "zarr", "kvstore": {"driver": "file", "path": "target.w"}}
    tree = {"target": {"w": array}, "state": {"step": np.int32(1)}, "version": 3}
    (folder / "t5x" / "checkpoint").write_bytes(serialization.msgpack_serialize(tree))
    return folder / "t5x"


def write_orbax(folder):
    ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / "orbax", args=ocp.args.PyTreeSave(dict(ARRAYS)))
    return folder / "orbax"


WRITERS = (
    write_npz,
    write_compressed_npz,
    write_msgpack,
    write_safetensors,
    write_tf,
    write_partitioned_tf,
    write_t5x,
    write_orbax,
)
# What a reader looks at; Orbax keeps other things as well, which nothing depends on.
READ = ("*.npz", "*.msgpack", "*.safetensors", "*.index", "*.data-*", "checkpoint", ".zarray")
READ += ("0.0", "_METADATA", "manifest.ocdbt", "d/*")


def read_everything(path):
    for lazy in load(path).values():
        lazy.get()


@contextmanager
def process_within(n_bytes):
    """Checks how much the process has grown: TensorStore's threads reserve more than they take."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < n_bytes


def is_refused(path):
    """Whether reading ends in one of the errors that it may end in."""
    try:
        read_everything(path)
    except UnreadableFile as error:
        assert "Cannot read" in str(error)
        return True
    except FileNotFoundError:
        return True  # The damaged text names another checkpoint.
    return False


def fuzz(write, folder, n_rounds, seed, memory_within):
    """Damages one file at a time; counts how often the damage was refused."""
    rng, refused = np.random.default_rng(seed), 0
    path = write(folder)
    files = sorted(
        file for pattern in READ for file in folder.rglob(pattern) if file.stat().st_size
    )
    read_everything(path)
    has_threads = write in (write_t5x, write_orbax)
    for _ in range(n_rounds):
        file = files[int(rng.integers(len(files)))]
        whole = file.read_bytes()
        # Another file in its place: what was mapped stays what it was.
        file.unlink()
        file.write_bytes(mutated(rng, whole))
        with process_within(4 * MOST_MEMORY) if has_threads else memory_within(MOST_MEMORY):
            refused += is_refused(path)
        file.unlink()
        file.write_bytes(whole)
    read_everything(path)
    return refused


@pytest.mark.filterwarnings("ignore")  # NumPy and Python warn of odd headers before they refuse.
@pytest.mark.parametrize("n, seed", [(60, 0), *(thorough(625, seed) for seed in range(1, 17))])
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_damage_at_random_is_refused_or_harmless(write, tmp_path, n, seed, memory_within):
    assert fuzz(write, tmp_path, n, seed, memory_within) > min(n // 6, 100)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["w.npz", "w.msgpack", "w.safetensors", "m.index", "checkpoint"])
def test_bytes_at_random_are_refused(name, tmp_path):
    if name == "m.index":
        pytest.importorskip("tensorflow", reason="tensorflow is not installed")
    rng = np.random.default_rng(0)
    for size in (1, 9, 50, 500, 5000) * 4:
        (tmp_path / name).write_bytes(rng.bytes(size))
        with pytest.raises((UnreadableFile, FileNotFoundError)):
            load(tmp_path / (name if "." in name else ""))
