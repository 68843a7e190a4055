"""The benchmark of faults, in short: killed and damaged, runs end as if nothing had happened."""

import re
import sys
from pathlib import Path

import pytest
from marks import slow, thorough

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("n_kills", "n_damages"),
    [
        slow(4, 1),
        thorough(40, 12),
    ],
)
def test_no_run_is_lost(n_kills, n_damages, run_child):
    numbers = ["--kills", str(n_kills), "--damages", str(n_damages), "--sizes"]
    command = [sys.executable, "-m", "benchmarks.faults", *numbers]
    done = run_child(command, cwd=ROOT, seconds=580)
    assert done.returncode == 0, done.stdout + done.stderr
    total = re.search(r"^in \d+ runs +(\d+) +(\d+) +(\d+) +(\d+)$", done.stdout, re.MULTILINE)
    assert total, done.stdout
    tried, detected, survived, lost = map(int, total.groups())
    assert tried >= n_kills + n_damages
    assert (detected, survived, lost) == (n_damages, tried, 0)
