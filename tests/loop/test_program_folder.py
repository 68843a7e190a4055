"""ProgramFolder: programs are read whole and stay within a size, with other processes or kills."""

import os
import subprocess
import sys
import time

import jax
import pytest

from flaxfit.loop._program_folder import ProgramFolder

DAY = 24 * 3600


@pytest.fixture(autouse=True)
def _no_other_folder():
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def names(folder, end=".program"):
    return sorted(path.name.removesuffix(end) for path in folder.glob(f"*{end}"))


def test_what_was_put_is_read_and_what_is_damaged_is_deleted(tmp_path):
    programs = ProgramFolder(tmp_path, 1000)
    assert programs.get("a") is None
    programs.put("a", b"text")
    assert programs.get("a") == b"text"
    whole = (tmp_path / "a.program").read_bytes()
    for damaged in (whole[:-1], whole[:10], b"", whole[:-1] + b"T"):
        (tmp_path / "a.program").write_bytes(damaged)
        assert programs.get("a") is None and names(tmp_path) == []
    programs.put("a", b"text")
    assert programs.get("a") == b"text"


def test_the_least_recently_used_programs_go(tmp_path):
    programs = ProgramFolder(tmp_path, 500)
    for i in range(4):
        programs.put(f"p{i}", bytes(50))
        os.utime(tmp_path / f"p{i}.program", (i, i))
    assert programs.get("p0") is not None  # Now the most recently used.
    for i in range(4, 8):
        programs.put(f"p{i}", bytes(50))
    kept = names(tmp_path)
    assert "p0" in kept and "p7" in kept and "p1" not in kept
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 500
    programs.put("large", bytes(501))
    assert names(tmp_path) == kept


def test_parts_of_killed_processes_are_deleted_and_those_of_others_stay(tmp_path):
    for name, age in ("old", DAY), ("new", 0):
        (tmp_path / f"{name}.part").write_bytes(b"half")
        os.utime(tmp_path / f"{name}.part", (time.time() - age,) * 2)
    ProgramFolder(tmp_path, 1000).put("a", b"text")
    assert names(tmp_path, ".part") == ["new"]


def test_a_folder_that_is_gone_keeps_nothing(tmp_path):
    programs = ProgramFolder(tmp_path / "gone", 1000)
    programs.put("a", b"text")
    assert programs.get("a") is None


WRITER = """
import sys
from pathlib import Path
from flaxfit.loop._program_folder import ProgramFolder
programs, n = ProgramFolder(Path(sys.argv[1]), 10_000_000), 0
print("ready", flush=True)
while True:
    n += 1
    programs.put(f"key{n % 5}", bytes([n % 256]) * 300_000)
    found = programs.get(f"key{(n + 2) % 5}")
    assert found is None or (len(found) == 300_000 and len(set(found)) == 1)
"""


@pytest.mark.slow
def test_processes_that_write_at_once_and_are_killed_leave_whole_programs(tmp_path):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for writer in writers:
            assert writer.stdout.readline() == b"ready\n"
        for _ in range(300):
            for i in range(5):
                found = ProgramFolder(tmp_path, 10_000_000).get(f"key{i}")
                assert found is None or len(found) == 300_000
        assert [writer.poll() for writer in writers] == [None, None]
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    for name in names(tmp_path):
        assert ProgramFolder(tmp_path, 10_000_000).get(name) is not None
