"""SLURM starts the processes of a run, and a job that is told to end starts again and resumes."""

import re
import tempfile
from pathlib import Path

import pytest
from slurm_cluster import DAEMONS, Cluster

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"
MISSING = [name for name, path in DAEMONS.items() if path is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"{', '.join(MISSING)} not installed: apt-get install slurm-wlm munge",
    ),
]


@pytest.fixture(scope="module")
def cluster():
    # A short path: names of sockets have a limit.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, Cluster(Path(folder)) as cluster:
        yield cluster


def test_two_processes_on_two_nodes_train_as_one_does(cluster, job, run_child, assert_as_alone):
    command = ["srun", "-n", "2", "-N", "2", "python", "train.py"]
    done = run_child(
        command, cwd=job.folder, env={**job.variables, **cluster.variables}, seconds=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_as_alone(job)


def test_the_recipe_requeues_a_job_that_is_told_to_end_and_it_resumes_to_the_bits_of_a_whole_run(
    cluster, job, assert_as_alone
):
    recipe = re.findall(r"^## SLURM$.*?^```sh\n(.*?)^```$", PAGE.read_text(), re.M | re.S)[0]
    (job.folder / "recipe.sh").write_text(recipe)
    (job.folder / "signal-at-8").touch()
    # Two processes on one machine, each of which sees a GPU of its own.
    variables = {
        **job.variables,
        **cluster.variables,
        "JAX_LOGGING_LEVEL": "INFO",
    }
    options = ["--nodes=1", "--ntasks-per-node=2", "recipe.sh"]
    number = cluster.ask("sbatch", "--parsable", *options, cwd=job.folder, env=variables)
    log = job.folder / f"slurm-{number}.out"

    def wait_for(what, is_so):
        cluster.until(what, is_so, seconds=120, logs=[log])

    def job_is(state):
        return cluster.ask("squeue", "-h", "-tall", f"-j{number}", "-o%T") == state

    wait_for("the job has reached step 8", (job.folder / "has-reached-8").exists)
    cluster.ask("scancel", "--signal=TERM", number)
    wait_for("the job is in the queue again", lambda: job_is("PENDING"))
    assert not job.results()
    cluster.ask("scontrol", "update", f"JobId={number}", "StartTime=now")  # Not in two minutes.
    wait_for("the job has ended", lambda: job_is("COMPLETED"))
    assert_as_alone(job)
    text = log.read_text()
    assert re.search(r"received SIGTERM: step \d+ is saved", text)
    assert re.search(r"restored step \d+", text)
    assert len(re.findall(r"visible devices: 0$", text, re.M)) == 4
