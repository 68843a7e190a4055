import gc
import os
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager

import pytest
from checkpoint_files import SMALL, make_checkpoint

from flaxfit.checkpoints import CheckpointFileWriter, _lock, list_steps, restore, save

PROGRAM = """
import fcntl, os, sys
try:
    fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("locked", flush=True)
else:
    print("free", flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_process(folder):
    """A process that holds a folder from now on if it can; gives what it says."""
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **streams) as process:
        yield process.stdout.readline().strip()
        process.stdin.close()


def is_free(folder):
    with other_process(folder) as said:
        assert said in ("free", "locked")
        return said == "free"


def test_another_process_cannot_save_into_the_folder_of_a_writer(tmp_path):
    with CheckpointFileWriter(tmp_path) as writer:
        assert not is_free(tmp_path)
        writer(make_checkpoint(1))
        assert not is_free(tmp_path)
    assert is_free(tmp_path)
    writer(make_checkpoint(2))
    assert not is_free(tmp_path)
    writer.close()
    assert list_steps(tmp_path) == [1, 2]


def test_the_folder_of_another_process_is_left_alone(tmp_path):
    writer = CheckpointFileWriter(tmp_path)
    writer.close()
    (tmp_path / "saving-7-0").mkdir()
    with other_process(tmp_path) as said:
        assert said == "free"
        with pytest.raises(BlockingIOError, match="Cannot save here: another process is saving"):
            CheckpointFileWriter(tmp_path)
        with pytest.raises(BlockingIOError, match=str(tmp_path)):
            writer(make_checkpoint(1))
        writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["saving-7-0"]


@pytest.mark.slow
def test_a_writer_that_is_forgotten_locks_nothing(tmp_path):
    CheckpointFileWriter(tmp_path)
    gc.collect()
    assert is_free(tmp_path)


@pytest.mark.slow
def test_a_forked_child_does_not_keep_the_lock_of_its_parent(tmp_path):
    program = """
        import os, sys, time
        from pathlib import Path
        from flaxfit.checkpoints import _lock
        lock = _lock.hold(Path(sys.argv[1]))
        if os.fork() == 0:
            print("held", flush=True)
            sys.stdin.read()
            os._exit(0)
        os._exit(9)
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        assert process.wait(timeout=60) == 9
        lock = _lock.hold(tmp_path)  # The child is still there.
        assert lock is not None
        process.stdin.close()


def test_writers_of_one_process_take_turns(tmp_path):
    writers = [CheckpointFileWriter(tmp_path, keep=None) for _ in range(2)]

    def write(first):
        for step in range(first, 8, 2):
            writers[first](make_checkpoint(step))

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 1)]
    for writer in writers:
        writer._found = []
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    save(tmp_path, make_checkpoint(8))
    for writer in writers:
        writer.close()
    assert list_steps(tmp_path) == list(range(9))
    for step in range(9):
        assert int(restore(tmp_path, SMALL, which=step).step) == step
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(step) for step in range(9)]


def test_a_file_system_without_locks_is_taken_as_it_is(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl", reason="there are no such locks on Windows")

    def unsupported(descriptor, operation):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    before = len(os.listdir("/dev/fd"))
    assert _lock.hold(tmp_path) is None
    assert len(os.listdir("/dev/fd")) == before
    assert save(tmp_path, make_checkpoint(1)).exists()
