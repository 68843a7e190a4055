"""Several processes on one machine train as one does; and differences between them are errors."""

import json
import re
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from marks import usual

import flaxfit as ff

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("many_processes.py")
NAMES = ("data_parallel", "fsdp")


@pytest.fixture(scope="module")
def two(launch, tmp_path_factory, request):
    """The folder in which two processes with two devices each have left their results."""
    folder = tmp_path_factory.mktemp("two")
    own = [item for item in request.session.items if item.path == request.path]
    extra = ["thorough"] if any(item.get_closest_marker("thorough") for item in own) else []
    output = launch(SCRIPT.name, folder, *extra, options=["--cpu-devices", 2])
    (folder / "output").write_text(output)
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


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], expected[key]) for key in expected)


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_allclose(found[key], array, rtol=1e-5, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_every_process_comes_to_the_same(two, name):
    assert_same(*(results(two, name, process) for process in (0, 1)))


@pytest.mark.parametrize("name", usual("fsdp", of=NAMES))
def test_two_processes_train_measure_and_predict_as_one_does(two, alone, name, tmp_path):
    strategy = alone.STRATEGIES[name]()
    loop, expected = alone.trained(strategy, tmp_path)
    expected["predictions"] = alone.predict(strategy, loop.state)
    found = results(two, name, 0)
    for each in ("params", "metrics", "predictions"):
        assert_close(part(found, each), named(expected[each]))


def test_both_implementations_of_data_parallel_give_two_processes_the_same_bits(two):
    for process in (0, 1):
        found = results(two, "mapped", process)
        expected = results(two, "data_parallel", process)
        assert {key.split("[")[0] for key in found} == {"params", "metrics", "predictions"}
        assert all(np.array_equal(found[key], expected[key]) for key in found)


def test_two_processes_fit_as_one_does(two, alone):
    found = results(two, "data_parallel", 0)
    predicted = alone.fitted(ff.DataParallel()).predict(alone.X, batch_size=8)
    assert_close(part(found, "fitted"), named(predicted))


@pytest.mark.parametrize("name", NAMES)
def test_rows_gathered_on_the_devices_and_rows_assembled_on_the_hosts_are_the_same(two, name):
    found = results(two, name, 0)
    assert_same(part(found, "params"), part(found, "assembled"))


@pytest.mark.parametrize("name", usual("fsdp", of=NAMES))
def test_batches_that_each_process_brings_are_parts_of_one(two, alone, name):
    whole, _ = alone.train(alone.STRATEGIES[name](), alone.own_parts(), None)
    assert_close(part(results(two, name, 0), "own"), named(ff.gather(whole.state.params)))


@pytest.mark.parametrize("name", usual("fsdp", of=NAMES))
def test_two_processes_begin_with_loaded_weights(two, alone, name):
    assert_close(part(results(two, name, 0), "warm"), named(alone.weights()))


@pytest.mark.parametrize("name", usual("fsdp", of=NAMES))
def test_an_nnx_instance_gets_the_weights_of_its_model(two, alone, name):
    assert_same(*(part(results(two, name, 0), f"instance[{i}]") for i in range(2)))


@pytest.mark.parametrize("name", usual("fsdp", of=NAMES))
def test_two_processes_place_and_save_companions_as_one_does(two, alone, name):
    found, strategy = part(results(two, name, 0), "distilled"), alone.STRATEGIES[name]()
    assert_close(found, named(alone.distilled(strategy)))
    again = alone.distilled(strategy, two / f"{name}-distilled")  # It was complete.
    assert_same(found, named(again))


@pytest.mark.parametrize("name", NAMES)
def test_what_two_processes_saved_is_restored_by_one(two, alone, name):
    assert ff.checkpoints.list_steps(two / name) == [1, 6]
    loop, metrics = alone.train(alone.STRATEGIES[name](), alone.arrays(), 6, two / name)
    assert (loop.step, metrics) == (6, [])
    assert_same(named(ff.gather(loop.state.params)), part(results(two, name, 0), "params"))


def test_virtual_replicas_give_the_bits_of_one_process_and_go_on_in_it(two, alone, tmp_path, capfd):
    first, second = (results(two, "virtual", process) for process in (0, 1))
    assert_same(first, second)
    expected = alone.virtual(n_steps=8)
    checkpoints = tmp_path / "virtual"
    shutil.copytree(two / "virtual", checkpoints)
    capfd.readouterr()
    resumed, metrics = alone.train_virtual(checkpoints, n_steps=8)
    assert "bit for bit" not in capfd.readouterr().err
    assert part(first, "metrics") == named(expected["metrics"][:2])
    assert metrics == expected["metrics"][2:]
    assert_same(named(alone.part_of(resumed)), named(expected["state"]))
    assert_same(part(first, "smaller"), named(expected["smaller"]))


@pytest.fixture
def grain():
    return pytest.importorskip("grain", reason="grain is not installed")


def test_the_processes_divide_the_rows_of_a_grain_loader_by_its_shards(two, alone, grain):
    first, second = (
        {row.tobytes() for row in results(two, "grain", process)["rows"]} for process in (0, 1)
    )
    assert first.isdisjoint(second)
    assert first | second == {row.tobytes() for row in alone.X}


def test_each_process_goes_on_at_its_own_position_in_its_share_of_grain(two, grain):
    first, second = (results(two, "grain", process) for process in (0, 1))
    for found in (first, second):
        assert found["steps"].tolist() == [4, 5, 6]
        assert np.array_equal(found["resumed"], first["whole"])


@pytest.mark.parametrize("name", usual("fsdp", of=NAMES))
def test_one_process_may_end_the_run_of_all_and_the_clock_of_the_first_counts(two, name):
    for process in (0, 1):
        stopped = part(results(two, name, process), "stopped")
        assert stopped["['seen']"].tolist() == [1, 2, 3]
        assert stopped["['saved']"].tolist() == [1, 3]


@pytest.mark.parametrize("name", NAMES)
def test_what_differs_between_processes_is_an_error_in_all_of_them(two, name):
    first, second = (json.loads((two / f"{name}-{i}.json").read_text()) for i in (0, 1))
    assert first == second
    states = {"instances", "weights"}
    assert first.keys() == {"lengths", "shapes", "structures", "rates", "undivided", *states}
    kernels = {"fsdp": "the initial state:\n  process 0: checksum .* params/kernel: "}
    of_all = "the state:\n  process 0: checksum .* state/params/kernel: "
    assert re.search(kernels.get(name, of_all), first["instances"])
    assert "the weights" in first["weights"] and "4 differences, weights/0: " in first["weights"]
    assert "program from step 1 on: " in first["rates"] and "dense<-1.000000e-01>" in first["rates"]
    assert "'length': 50" in first["lengths"] and "'length': 51" in first["lengths"]
    assert "float32[4, 16]" in first["shapes"] and "float32[8, 16]" in first["shapes"]
    assert "process 0: step 1 as the first with inputs/0" in first["structures"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("use", ["train", "measure", "fit", "predict"])
def test_batches_that_nobody_divided_are_refused_in_every_process(two, alone, name, use):
    for process in (0, 1):
        said = json.loads((two / f"{name}-{process}.json").read_text())["undivided"][use]
        assert said.keys() == alone.shared_batches().keys()
        for text in said.values():
            assert "all of them would compute with the same rows" in text
            assert "ArrayStream" in text and "as_stream(data, shared=False)" in text


def test_only_the_first_process_prints(two, alone):
    lines = (two / "output").read_text().splitlines()
    # Gloo writes about its connections in pieces, of which some are empty or within other lines.
    own = [line for line in lines if "Gloo" not in line and "peer ranks" not in line]
    assert not [line for line in own if line.removeprefix("[1]").strip() and line[:3] == "[1]"]


@pytest.mark.thorough  # Virtual replicas, which promise it, are compared with one process above.
@pytest.mark.parametrize("names", [["fsdp"], [*NAMES, "virtual"]], ids=len)
def test_the_bits_do_not_depend_on_which_process_has_a_device(two, launch, tmp_path, names):
    launch(SCRIPT.name, tmp_path, *names, n=4, options=["--cpu-devices", 1])
    for name in names:
        four, pair = results(tmp_path, name, 3), results(two, name, 0)
        if name == "virtual":
            assert_same(four, pair)
            continue
        assert_same(part(four, "params"), part(pair, "params"))
        assert_close(part(four, "metrics"), part(pair, "metrics"))
