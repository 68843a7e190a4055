"""Checkpoints that TensorFlow wrote: small ones that are kept here, and fresh ones."""

import fcntl
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flax import serialization

HERE = Path(__file__).parent
SCRIPT = HERE / "write_with_tensorflow.py"


@pytest.fixture(scope="session")
def tensorflow():
    """Imported where tests of it are run, as it takes seconds."""
    return pytest.importorskip("tensorflow", reason="tensorflow is not installed")


@pytest.fixture(scope="session")
def kept():
    """The folder of the checkpoints that are kept in the repository."""
    return HERE / "fixtures"


@pytest.fixture(scope="session")
def truth():
    """What the checkpoints hold: functions by name, each giving arrays by name."""
    spec = importlib.util.spec_from_file_location("write_with_tensorflow", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CHECKPOINTS


@pytest.fixture(scope="session")
def small_t5(truth, tmp_path_factory):
    """The path of a T5 checkpoint in a format that needs no other library."""
    path = tmp_path_factory.mktemp("small_t5") / "small_t5.msgpack"
    path.write_bytes(serialization.msgpack_serialize(truth["small_t5"]()))
    return path


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """A folder of checkpoints that TensorFlow has just written."""
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed")
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # The first of the workers writes for all.
        shared = shared.parent
    folder, unfinished = shared / "tensorflow", shared / "tensorflow-unfinished"
    with open(shared / "tensorflow.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            command = [sys.executable, str(SCRIPT), str(unfinished)]
            subprocess.run(command, check=True, capture_output=True)
            unfinished.rename(folder)
    return folder
