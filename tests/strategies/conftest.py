"""What the tests of several processes share: how a script is run in them."""

import os
import sys
from pathlib import Path

import pytest

from flaxfit.checkpoints._environment import environment

FOLDER = Path(__file__).parent


@pytest.fixture(scope="session")
def launch(run_child, tmp_path_factory):
    """Runs a script of this folder in `n` processes, none of which outlives the call; its output.

    What they compile is kept, so that it is compiled once: a restarted job finds what it has
    compiled before. Not where the tests keep theirs, as some of these processes are killed.
    """
    programs = str(tmp_path_factory.mktemp("programs"))

    def run(script, *arguments, n=2, options=(), seconds=300):
        command = [sys.executable, "-m", "flaxfit.launch", "-n", str(n), *map(str, options)]
        done = run_child(
            [*command, str(FOLDER / script), *map(str, arguments)],
            seconds=seconds,
            env={
                **os.environ,
                "PYTHONPATH": str(FOLDER.parents[1]),
                "JAX_PLATFORMS": "cpu",
                "JAX_COMPILATION_CACHE_DIR": programs,
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                # The bits depend on the size of XLA's pool of threads: be it that of this process.
                "NPROC": str(environment()["cpu threads"]),
            },
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run
