"""The tests of uneven data, and of losses of every kind, once more on eight simulated devices."""

import os
import sys
from pathlib import Path

import pytest
from marks import thorough


@pytest.mark.slow
@pytest.mark.parametrize("which", ["not thorough", thorough("")], ids=["usual", "all"])
@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("loop/test_exact.py", "-8"),
        ("step/test_strategy_invariance.py", "test_a_loss_has and data-parallel"),
        ("step/test_divided_batch.py", "data-parallel"),
        ("step/test_whole_batch.py", "contrastive and values and (data or fsdp)"),
    ],
)
def test_a_file_of_tests_passes_on_eight_devices(run_child, file, pattern, which):
    tests = Path(__file__).parents[1] / file
    command = [sys.executable, "-m", "pytest", "-q", str(tests), "-k", pattern, "-m", which]
    done = run_child(
        command,
        env={**os.environ, "FLAXFIT_TEST_DEVICES": "8", "FLAXFIT_TEST_PASSED": ""},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and "skipped" not in done.stdout
