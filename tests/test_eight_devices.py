"""The tests of uneven data once more, on eight simulated devices."""

import os
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_uneven_data_is_exact_on_eight_devices(run_child):
    tests = Path(__file__).parent / "test_exact.py"
    command = [sys.executable, "-m", "pytest", "-q", str(tests), "-k", "-8", "-m", ""]
    done = run_child(
        command,
        env={**os.environ, "FLAXFIT_TEST_DEVICES": "8"},
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and "skipped" not in done.stdout
