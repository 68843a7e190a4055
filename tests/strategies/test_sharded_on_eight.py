"""The equality and the memory of Sharded once more, on eight simulated devices."""

import os
import sys
from pathlib import Path

import pytest
from marks import thorough


@pytest.mark.slow
@pytest.mark.parametrize(
    "wanted",
    [
        "(fifty_steps or any_number or each_device) and tensor or born",
        thorough("fifty_steps or any_number or each_device or born"),
    ],
    ids=["tensor", "all"],
)
def test_training_agrees_and_memory_is_divided_on_eight_devices(run_child, wanted):
    tests = Path(__file__).with_name("test_sharded.py")
    command = [sys.executable, "-m", "pytest", "-q", str(tests), "-k", wanted, "-m", ""]
    done = run_child(
        command,
        env={**os.environ, "FLAXFIT_TEST_DEVICES": "8", "FLAXFIT_TEST_PASSED": ""},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and "skipped" not in done.stdout
