"""The tests of uneven data, of losses of every kind and of `Sharded` on eight simulated devices."""

import os
import sys
from pathlib import Path

import pytest
from marks import thorough

TESTS = Path(__file__).parents[1]
# On eight devices that divide a batch in four parts each, a part has one row: too few for BatchNorm
# and for a loss of pairs.
SINGLE = "not BatchNorm and not (pairs and shard_map-4-rest)"
PATTERNS = {
    "tree/test_digest.py": "shard",
    "importers/test_placement.py": "",
    "loop/test_eval_loop.py": "any_number and -8-",
    "loop/test_predictor.py": "any_number and [8]",
    "loop/test_train_loop_exactness.py": "every_step and [8-",
    "strategies/test_sharded.py": "fifty_steps or any_number or each_device or born",
    "test_strategy_invariance.py": f"one and rest and (shard_map or FSDP-4) and {SINGLE}",
}
USUAL = PATTERNS | {
    "tree/test_digest.py": "does_not_depend_on_the_sharding",
    "loop/test_eval_loop.py": "any_number and numbers-8-",
    "strategies/test_sharded.py": "fifty_steps or any_number or each_device",
    "test_strategy_invariance.py": f"numbers_of_one and shard_map and {SINGLE}",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patterns", "which"),
    [(USUAL, "not thorough"), thorough(PATTERNS, "")],
    ids=["usual", "all"],
)
def test_files_of_tests_pass_on_eight_devices(run_child, patterns, which):
    of_files = [
        f"({Path(file).name} and ({pattern}))" if pattern else Path(file).name
        for file, pattern in patterns.items()
    ]
    command = [sys.executable, "-m", "pytest", "-v", "-k", " or ".join(of_files), "-m", which]
    done = run_child(
        [*command, *(str(TESTS / file) for file in PATTERNS)],
        env={**os.environ, "FLAXFIT_TEST_DEVICES": "8", "FLAXFIT_TEST_PASSED": ""},
        cwd=TESTS.parent,
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout
    passed = [line for line in done.stdout.splitlines() if " PASSED " in line]
    assert not [file for file in PATTERNS if not any(file in line for line in passed)]
