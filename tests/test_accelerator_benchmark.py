"""The command for accelerators: its quick form runs, its checks fail on errors, it reads traces."""

import json
import sys
from pathlib import Path

import optax
import pytest
from jax.profiler import ProfileData
from marks import thorough

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [["correctness", "trace"], thorough(["steps", "calls", "data", "loader", "saving", "memory"])],
    ids=["checks", "figures"],
)
def test_the_quick_form_passes_its_checks_and_fills_its_tables(
    sections, tmp_path, environment, run_child
):
    if "steps" in sections:
        pytest.importorskip("keras")
        pytest.importorskip("torch")
    command = [sys.executable, "-m", "benchmarks.accelerator", "--out", str(tmp_path), "--quick"]
    done = run_child(
        [*command, "--sections", *sections],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        seconds=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "accelerator.json").read_text())
    text = (tmp_path / "accelerator.md").read_text()
    assert content["quick"] and content["environment"]["platform"] == "cpu"
    assert {part.partition(":")[0] for part in content["parts"]} == set(sections)
    for part, rows in content["parts"].items():
        named = [row for row in rows if "name" in row]
        assert f"## {part}" in text and named
        assert all(f"| {row['name']} |" in text for row in named)
        if part.startswith("correctness"):
            assert len(named) == 15 and all(row["passed"] for row in named)
        elif part.startswith("trace"):
            assert all(0 <= row["idle"] < 1 and row["n_operations"] > 10 for row in named)
        else:
            assert all(row["value"] > 0 for row in named if "left_out" not in row)
            assert not any("left_out" in row for row in named if "torch" not in row["base"])


@pytest.mark.slow
def test_parity_fails_a_learning_rate_that_is_a_little_off():
    from benchmarks.accelerator import parity
    from benchmarks.linen_models import MLP

    batches = parity.batches_of(parity.X, parity.Y, 16, 16)
    optimizer = optax.sgd(parity.RATE * (1 + 4 * parity.TOLERANCE[None]), parity.MOMENTUM)
    with pytest.raises(parity.Failed, match="of the way apart"):
        parity.parity(MLP(4, 16), batches, optimizer=optimizer)()


def test_bits_dtypes_and_signs_of_zero_count():
    import numpy as np

    from benchmarks.accelerator import correctness

    zero = np.zeros(2, np.float32)
    correctness.same_bits({"a": zero}, {"a": zero.copy()}, "x")
    for other in (-zero, zero.astype(np.float64), np.zeros((2, 1), np.float32)):
        with pytest.raises(correctness.Failed, match="x: an array of"):
            correctness.same_bits({"a": zero}, {"a": other}, "x")


CHECKS = [{"name": "a", "passed": True, "found": "x"}, {"name": "b", "passed": False, "found": "y"}]
FIGURE = {"name": "TrainLoop", "base": "hand-written", "unit": "us", "value": 3.0}
FIGURE |= {"base_value": 2.0, "ratio": 1.5, "bounds": [1.4, 1.6]}


@pytest.mark.parametrize(
    ("rows", "status", "said"),
    [
        (CHECKS[:1], 0, "| a | passed | x |"),
        (CHECKS, 1, "| b | FAILED | y |"),
        ([{"broken": "it ended", "is_failure": True}], 1, "\nit ended"),
        ([{"broken": "it took long", "is_failure": False}], 0, "\nit took long"),
    ],
)
def test_what_fails_decides_the_status(rows, status, said, tmp_path, monkeypatch, capsys):
    from benchmarks.accelerator import __main__ as command

    device = {"platform": "gpu", "device": "X", "n_devices": 2, "bytes_limit": 2**34}
    device |= {"python": "3", "versions": {"jax": "1", "torch": None}}
    flags = []

    def rows_of(part, seconds, options, environment, folder):
        flags.append((part, environment.get("XLA_FLAGS", "")))
        if part == "device:all":
            return [device]
        return rows if part == "correctness:all" else [FIGURE]

    monkeypatch.setattr(command, "_rows_of", rows_of)
    monkeypatch.setenv("XLA_FLAGS", "--own")
    arguments = ["--out", str(tmp_path), "--sections", "correctness", "calls"]
    assert command.main(arguments) == status
    text = (tmp_path / "accelerator.md").read_text()
    assert text.startswith("# flaxfit on 2 x X, 16 GiB\n\nPython 3, jax 1.\n")
    assert (
        said in text and "| TrainLoop | 3 | 1.500 | 1.400 to 1.600 | hand-written, 2 us |" in text
    )
    assert dict(flags) == {
        "device:all": "--own",
        "correctness:all": "--own --xla_gpu_deterministic_ops=true",
        "calls:mlp": "--own",
    }
    capsys.readouterr()


@pytest.fixture
def run_part(tmp_path, monkeypatch):
    """Runs a part whose process writes a row and a half, and then runs some code."""
    from benchmarks.accelerator import __main__ as command

    def run(code, seconds):
        script = tmp_path / "python"
        rows = """'{"name": 1}\\n{"na'"""
        (tmp_path / "part.py").write_text(
            f"import sys, time\nopen(sys.argv[-1], 'w').write({rows})\n{code}\n"
        )
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/part.py "$@"\n')
        script.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setattr(command.sys, "executable", str(script))
            patch.setattr(command, "_LEAST_SECONDS", 0.1)
            return [*command._rows_of("steps:mlp", seconds, [], {}, str(tmp_path))]

    return run


def test_a_part_that_dies_leaves_the_rows_that_it_had(run_part):
    row, broken = run_part("print('reason'); sys.exit(3)", 60)
    assert row == {"name": 1} and broken["is_failure"]
    assert broken["broken"] == "The rest is missing: it ended with status 3: reason"


def test_a_part_that_hangs_is_ended(run_part):
    *_, broken = run_part("time.sleep(600)", 0.3)
    assert broken["broken"].startswith("The rest is missing: it took longer than 0 s")
    assert not broken["is_failure"]
    (broken,) = run_part("", 0.05)
    assert broken["broken"] == "There was no time left."


def plane(name, **lines):
    """The text of a plane: its lines, with events of a name, a start and a duration in ns."""
    numbers = {event[0]: i + 1 for i, event in enumerate(sum(lines.values(), []))}
    text = f'planes {{ name: "{name}" '
    for line, events in lines.items():
        text += f'lines {{ name: "{line.replace("_", " ")}" '
        for event, start, length in events:
            text += f"events {{ metadata_id: {numbers[event]} offset_ps: {start * 1000} "
            text += f"duration_ps: {length * 1000} }} "
        text += "} "
    for event, i in numbers.items():
        text += f'event_metadata {{ key: {i} value {{ id: {i} name: "{event}" }} }} '
    return text + "} "


HOST = plane("/host:CPU", python=[("f", 0, 1000)])
GPU = {
    "Stream_#13": [("fusion", 100, 100), ("gemm", 250, 50)],
    "Stream_#14": [("MemcpyH2D", 180, 60), ("reduce", 150, 80), ("MemcpyD2H", 400, 10)],
    "XLA_Modules": [("jit_step", 100, 900)],
}


@pytest.mark.parametrize(
    ("planes", "device", "idle", "gap", "transfers", "n"),
    [
        # Busy from 100 to 230 and from 250 to 300.
        ([plane("/device:GPU:0", **GPU)], "/device:GPU:0", 20 / 200, 20, 60 / 200, 3),
        (
            [plane("/device:TPU:0", XLA_Ops=[("a", 0, 10), ("b", 30, 10)], Steps=[("0", 0, 99)])],
            "/device:TPU:0",
            20 / 40,
            20,
            0,
            2,
        ),
        ([plane("/device:GPU:1", Stream=[("a", 0, 5)])], "/device:GPU:1", 0, 0, 0, 1),
    ],
    ids=["gpu", "tpu", "one operation"],
)
def test_idle_time_is_read_from_a_trace(planes, device, idle, gap, transfers, n):
    from benchmarks.accelerator.idle import summarise

    found = summarise(ProfileData.from_text_proto(HOST + "".join(planes)))
    assert (found.device, found.n_operations) == (device, n)
    assert found.idle == pytest.approx(idle)
    assert found.longest_gap == pytest.approx(gap * 1e-9)
    assert found.transfers == pytest.approx(transfers)


def test_a_trace_without_operations_is_refused():
    from benchmarks.accelerator.idle import summarise

    with pytest.raises(ValueError, match="no operation of a device"):
        summarise(ProfileData.from_text_proto(HOST))
