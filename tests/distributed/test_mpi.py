"""Open MPI starts the processes of a run, and each finds its place among them."""

import re
import shutil
import subprocess

import pytest

from flaxfit.launch import _free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("mpirun") is None,
        reason="mpirun is not installed: apt-get install openmpi-bin",
    ),
]


def test_two_processes_train_as_one_does(job, run_child, assert_as_alone):
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True)
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
    if int(re.findall(r"Open MPI\) (\d+)", version.stdout)[0]) >= 5:
        options += ["-x", f"FLAXFIT_COORDINATOR_ADDRESS=127.0.0.1:{_free_port()}"]
    command = ["mpirun", *options, "python", "train.py"]
    done = run_child(command, cwd=job.folder, env=job.variables, seconds=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_as_alone(job)
