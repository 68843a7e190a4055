"""What the tests of engines share: a program that trains, and what it leaves when it runs alone."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from flaxfit.checkpoints._environment import environment

PROGRAM = Path(__file__).with_name("train.py")


class Trained:
    """A folder in which `python train.py` trains, and the variables that it needs there."""

    def __init__(self, folder, programs):
        self.folder = folder
        shutil.copy(PROGRAM, folder)
        self.variables = {
            # An engine may start these tests, too.
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_"))},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(PROGRAM.parents[2]),
            "TMPDIR": str(folder),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": programs,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            # The bits depend on the size of XLA's pool of threads: be it that of this process.
            "NPROC": str(environment()["cpu threads"]),
        }

    def results(self):
        """What each process has left."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("result-*.json"))]


@pytest.fixture
def job(tmp_path, programs):
    """A folder for a job that trains."""
    return Trained(tmp_path, programs)


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    return str(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def alone(run_child, tmp_path_factory, programs):
    """What one process leaves that no engine has started."""
    job = Trained(tmp_path_factory.mktemp("alone"), programs)
    done = run_child([sys.executable, "train.py"], cwd=job.folder, env=job.variables, seconds=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = job.results()
    assert result["n_processes"] == 1
    assert result["losses"][-1] < 0.5 * result["losses"][0]
    return result


@pytest.fixture(scope="session")
def assert_as_alone(alone):
    """Checks that two processes have trained together, to the bits of one."""

    def check(job):
        assert job.results() == [{**alone, "n_processes": 2}] * 2

    return check
