"""One of two processes comes to harm: both end soon, say why, and resume exactly."""

import re

import numpy as np
import pytest
from marks import thorough

SECONDS = 60
"""Within which the last process has ended and the first of the next attempt trains."""

WORDS = {
    "raising": (
        r"\[1\] flaxfit  process 1 of 2 failed, so all processes end: ArithmeticError: the harm",
        r"\[0\] flaxfit  .*process 1: ArithmeticError: the harm of a step",
        r"process 1 has ended with code 1$",
        r"process 0 has ended with code (1|88)$",
    ),
    "killed": (
        r"process 1 has ended with code -9 \(SIGKILL\)",
        r"process 0 has ended with code (1|-6 \(SIGABRT\))",
    ),
    "stopped": (
        r"heartbeat timeout|Of 2 processes, number 1 did not reach",
        r"process 0 has ended with code (1|-6 \(SIGABRT\))",
        r"killing process 1, which did not end",
    ),
    "out of data": (
        r"\[1\] TimeoutError: Of 2 processes, number 0 did not reach 'what comes next'",
        r"process 1 has ended with code 1$",
        r"process 0 has ended with code (1|88)$",
    ),
    "told to end": (
        r"received SIGTERM: step \d+ is saved",
        r"process 0 has ended with code 85$",
        r"process 1 has ended with code 85$",
    ),
    "hanging when told": (
        r"SIGTERM arrived 2 s ago, and no step and no save was completed since",
        r"process 1 has ended with code 86$",
    ),
}

USUAL = ("killed", "raising", "told to end")
"""Those that come to one job, in each attempt another; one that hangs is in `test_watchdog.py`."""


@pytest.fixture(scope="module")
def run(launch):
    """Runs the job in a folder, with a fault in each attempt but the last; what it prints."""

    def run(folder, *faults):
        options = ["--restarts", len(faults), "--grace", 10]
        return launch("faults.py", folder, *faults, options=options)

    return run


def expected(n_steps):
    """The parameters after so many steps, by NumPy's Adam."""
    rows = [np.random.default_rng(process) for process in (0, 1)]
    params, mean, square = np.zeros(3), np.zeros(3), np.zeros(3)
    for step in range(1, n_steps + 1):
        x = np.concatenate([each.normal(size=(4, 3)).astype(np.float32) for each in rows])
        # The loss of an example is the mean of (x * params - x) ** 2 over its three elements.
        grad = (2 * x * (x * params - x)).mean(0) / 3
        mean, square = 0.9 * mean + 0.1 * grad, 0.999 * square + 0.001 * grad**2
        moved = (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
        params = params - 0.1 * moved
    return params


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults", [USUAL, *(thorough((name,)) for name in WORDS if name not in USUAL)], ids=", ".join
)
def test_both_processes_end_say_why_and_resume_to_the_bits_of_an_unharmed_run(
    faults, run, tmp_path
):
    output = run(tmp_path, *faults)
    for words in (words for fault in faults for words in WORDS[fault]):
        assert re.search(words, output, re.MULTILINE), f"{words}\n{output}"
    for i in range(len(faults)):
        harmed, restarted = (tmp_path / f"harmed-{i}", tmp_path / f"restarted-{i + 1}")
        assert float(restarted.read_text()) - float(harmed.read_text()) < SECONDS
    assert len(re.findall(r"\[0\] flaxfit  restored step \d", output)) == len(faults)
    first, second = (np.load(tmp_path / f"params-{process}.npz") for process in (0, 1))
    assert np.array_equal(first["resumed"], second["resumed"])
    assert np.array_equal(first["resumed"], first["unharmed"])
    np.testing.assert_allclose(first["resumed"], expected(60), rtol=1e-4)


@pytest.mark.slow
def test_processes_that_leave_a_loop_end_in_order(launch, tmp_path):
    assert "has ended with code" not in launch("left_loop.py", tmp_path / "run")
