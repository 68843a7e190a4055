"""One of two processes comes to harm: both end soon, say why, and go on exactly when restarted."""

import re

import numpy as np
import pytest
from marks import usual

SECONDS = 60
"""Within which the last process has ended and the first of the next attempt trains."""

WORDS = {
    "raising": (
        r"\[1\] flaxfit  process 1 of 2 failed, so all processes end: ArithmeticError: the harm",
        r"\[0\] flaxfit  .*process 1: ArithmeticError: the harm of step 5",
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

# One that is killed stands in another test below, and one that hangs in `test_watchdog.py`.
USUAL = ("raising", "told to end")


@pytest.fixture
def run(launch):
    """Runs the job in a folder, with a fault; what it prints."""
    options = ["--restarts", 1, "--grace", 10]
    return lambda folder, fault: launch("faults.py", folder, fault, options=options, seconds=180)


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
    "fault",
    usual(*USUAL, of=WORDS),
)
def test_both_processes_end_say_why_and_go_on_where_they_were(fault, run, tmp_path):
    output = run(tmp_path, fault)
    for words in WORDS[fault]:
        assert re.search(words, output, re.MULTILINE), f"{words}\n{output}"
    harmed, restarted = (float((tmp_path / n).read_text()) for n in ("harmed", "restarted"))
    assert restarted - harmed < SECONDS
    assert re.search(r"\[0\] flaxfit  restored step \d", output)
    first, second = (np.load(tmp_path / f"params-{process}.npy") for process in (0, 1))
    assert np.array_equal(first, second)
    n_steps = 60 if fault == "told to end" else 10
    np.testing.assert_allclose(first, expected(n_steps), rtol=1e-4)


@pytest.mark.slow
def test_a_restarted_run_ends_at_the_very_bits_of_one_that_was_not_harmed(run, tmp_path):
    for fault in ("none", "killed"):
        (tmp_path / fault).mkdir()
        run(tmp_path / fault, fault)
    first, second = (np.load(tmp_path / f / "params-0.npy") for f in ("none", "killed"))
    assert np.array_equal(first, second)
