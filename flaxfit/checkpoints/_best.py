"""Which step of a folder has the best value of the metric that its writer monitored."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flaxfit.checkpoints import _folder
from flaxfit.checkpoints._record import read_record
from flaxfit.checkpoints._seal import Damaged


def ranking(records: Mapping[int, Mapping[str, Any]], monitor: Mapping[str, str]) -> list[int]:
    """The steps whose monitored metric is a number, best first; among equals, the last first.

    >>> records = {step: {"metrics": {"loss": x}} for step, x in enumerate([3.0, 1.0, 1.0])}
    >>> ranking(records, {"name": "loss", "mode": "min"})
    [2, 1, 0]
    """
    sign = 1 if monitor["mode"] == "max" else -1
    values = {
        step: sign * record["metrics"].get(monitor["name"], math.nan)
        for step, record in records.items()
    }
    finite = [step for step, value in values.items() if math.isfinite(value)]
    return sorted(finite, key=lambda step: (values[step], step), reverse=True)


def best_step(folder: Path, steps: Iterable[int], monitor: Mapping[str, str]) -> int | None:
    """The best of some steps; a step whose record is damaged cannot be it."""
    records = {}
    for step in steps:
        try:
            records[step] = read_record(_folder.step_path(folder, step))
        except Damaged:
            continue
    return next(iter(ranking(records, monitor)), None)
