"""The examples: each is short, runs without a warning and reaches what it promises."""

import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from marks import thorough

EXAMPLES = Path(__file__).parents[1] / "examples"
LEAST_ACCURACY = {
    "01_digits.py": 0.96,
    "02_loop.py": 0.95,
    "03_any_data.py": 0.8,
    "04_resume.py": 0.95,
    "05_param_groups.py": 0.88,
    "06_sharded.py": 0.28,
    "07_import_t5.py": 0.85,
    "08_export.py": 0.94,
    "09_linen.py": 0.95,
}
NEEDS = {
    "03_any_data.py": ("grain", "mlxtend", "torch"),
    "05_param_groups.py": ("mlxtend",),
    "07_import_t5.py": ("flatbuffers",),
    "08_export.py": ("flatbuffers",),
}


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == LEAST_ACCURACY.keys()


@pytest.mark.parametrize("name", LEAST_ACCURACY)
def test_an_example_is_under_a_hundred_lines(name):
    assert len((EXAMPLES / name).read_text().splitlines()) < 100


def assert_accuracy(name, done):
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"test accuracy (\d\.\d{4})$", done.stdout.strip())
    assert accuracy, f"no result line in:\n{done.stdout}"
    assert float(accuracy[1]) >= LEAST_ACCURACY[name]


RESUMED = "04_resume.py"
"""It is run by a test of its own."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in LEAST_ACCURACY if n != RESUMED])
def test_an_example_reaches_its_accuracy(name, tmp_path, environment, run_child):
    for package in NEEDS.get(name, ()):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    # What other packages warn of when they are imported is not for this test to judge.
    strict = [] if name in NEEDS else ["-W", "error"]
    command = [sys.executable, *strict, str(EXAMPLES / name)]
    assert_accuracy(name, run_child(command, cwd=tmp_path, env=environment))


@pytest.mark.slow
@pytest.mark.parametrize("n_kills", [1, thorough(2)])
def test_a_killed_example_ends_with_the_weights_of_the_whole_run(
    n_kills, tmp_path, own_environment, run_child
):
    def run(*arguments):
        command = [sys.executable, "-W", "error", str(EXAMPLES / RESUMED), *arguments]
        return run_child(command, cwd=tmp_path, env=own_environment)

    whole = run("whole")
    assert_accuracy(RESUMED, whole)
    for _ in range(n_kills):
        killed = run("killed", "--kill")
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run("killed")
    assert resumed.returncode == 0, resumed.stderr
    digests = [re.findall(r"digest of the weights (\w{64})", d.stdout) for d in (resumed, whole)]
    assert digests[0] == digests[1] and len(digests[0]) == 1
