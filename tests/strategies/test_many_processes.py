"""Several processes on one machine train as one does; and differences between them are errors."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import flaxfit as ff
from flaxfit.checkpoints._environment import environment

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("many_processes.py")
NAMES = ("data_parallel", "fsdp")


def launch(folder, n, devices):
    """Runs the script in `n` processes, none of which outlives this function."""
    command = [sys.executable, "-m", "flaxfit.launch", "-n", str(n)]
    command += ["--cpu-devices", str(devices), str(SCRIPT), str(folder)]
    launcher = subprocess.Popen(
        command,
        # The bits depend on the size of XLA's pool of threads: let it be that of this process.
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "NPROC": str(environment()["cpu threads"]),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = launcher.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
    assert launcher.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder in which two processes with two devices each have left their results."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "output").write_text(launch(folder, 2, 2))
    return folder


@pytest.fixture(scope="module")
def alone():
    """The results of this process, with four devices."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import many_processes
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return many_processes


def results(folder, name, process):
    with np.load(folder / f"{name}-{process}.npz") as file:
        return dict(file)


def part(arrays, name):
    return {key[len(name) :]: array for key, array in arrays.items() if key.startswith(name)}


def named(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_allclose(found[key], array, rtol=1e-5, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_every_process_comes_to_the_same(two, name):
    first, second = (results(two, name, process) for process in (0, 1))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_train_measure_and_predict_as_one_does(two, alone, name, tmp_path):
    expected = alone.everything(alone.STRATEGIES[name](), tmp_path)
    found = results(two, name, 0)
    for each in ("params", "metrics", "predictions", "dropped"):
        assert_close(part(found, each), named(expected[each]))


@pytest.mark.parametrize("name", NAMES)
def test_rows_gathered_on_the_devices_and_rows_assembled_on_the_hosts_are_the_same(two, name):
    found = results(two, name, 0)
    on_devices, on_hosts = part(found, "params"), part(found, "assembled")
    assert on_devices.keys() == on_hosts.keys()
    assert all(np.array_equal(on_devices[key], on_hosts[key]) for key in on_devices)


@pytest.mark.parametrize("name", NAMES)
def test_batches_that_each_process_brings_are_parts_of_one(two, name):
    found = results(two, name, 0)
    assert_close(part(found, "own"), part(found, "dropped"))


@pytest.mark.parametrize("name", NAMES)
def test_what_two_processes_saved_is_restored_by_one(two, alone, name):
    assert ff.checkpoints.list_steps(two / name) == [6, 11]
    loop, metrics = alone.train(alone.STRATEGIES[name](), alone.arrays(), 11, two / name)
    assert (loop.step, metrics) == (11, [])
    restored, found = named(ff.gather(loop.state.params)), part(results(two, name, 0), "params")
    assert all(np.array_equal(restored[key], found[key]) for key in found)


def test_virtual_replicas_give_the_bits_of_one_process_and_go_on_in_it(two, alone, tmp_path, capfd):
    first, second = (results(two, "virtual", process) for process in (0, 1))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)

    expected = alone.virtual(n_steps=13)
    checkpoints = tmp_path / "virtual"
    shutil.copytree(two / "virtual", checkpoints)
    capfd.readouterr()
    loop, metrics = alone.train(
        ff.DataParallel(virtual_replicas=8), alone.arrays(), 13, checkpoints
    )
    assert "bit for bit" not in capfd.readouterr().err
    assert part(first, "metrics") == named(expected["metrics"][:3])
    assert metrics == expected["metrics"][3:]
    found, whole = (named(tree) for tree in (alone.part_of(loop), expected["state"]))
    assert all(np.array_equal(found[key], whole[key]) for key in whole)
    found, whole = part(first, "unpadded"), named(expected["unpadded"])
    assert found.keys() == whole.keys()
    assert all(np.array_equal(found[key], whole[key]) for key in whole)


@pytest.mark.parametrize("name", NAMES)
def test_one_process_may_end_the_run_of_all_and_the_clock_of_the_first_counts(two, name):
    for process in (0, 1):
        stopped = part(results(two, name, process), "stopped")
        assert stopped["['seen']"].tolist() == [1, 2, 3]
        assert stopped["['saved']"].tolist() == [1, 3]


@pytest.mark.parametrize("name", NAMES)
def test_what_differs_between_processes_is_an_error_in_all_of_them(two, name):
    first, second = (json.loads((two / f"{name}-{i}.json").read_text()) for i in (0, 1))
    assert first == second
    assert first.keys() == {"lengths", "shapes", "structures"}
    assert "'length': 50" in first["lengths"] and "'length': 51" in first["lengths"]
    assert "float32[4, 16]" in first["shapes"] and "float32[8, 16]" in first["shapes"]
    assert "process 0: step 1 as the first with inputs/0" in first["structures"]


def test_only_the_first_process_prints(two, alone):
    lines = (two / "output").read_text().splitlines()
    # Gloo tells of its connections in pieces, and sometimes in the middle of another line.
    own = [line for line in lines if "Gloo" not in line and "peer ranks" not in line]
    assert not [line for line in own if line.startswith("[1]")]


@pytest.mark.slow
def test_the_bits_do_not_depend_on_which_process_has_a_device(two, tmp_path):
    launch(tmp_path, 4, 1)
    for name in NAMES:
        four, pair = results(tmp_path, name, 0), results(two, name, 0)
        found, expected = part(four, "params"), part(pair, "params")
        assert all(np.array_equal(found[key], expected[key]) for key in expected)
        assert_close(part(four, "metrics"), part(pair, "metrics"))
    four, pair = results(tmp_path, "virtual", 3), results(two, "virtual", 0)
    assert all(np.array_equal(four[key], pair[key]) for key in pair)
