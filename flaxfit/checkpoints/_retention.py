"""Which steps of a folder stay: the last ones, and the best by the monitored metric."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from flaxfit.checkpoints import _folder
from flaxfit.checkpoints._record import Record, read_record
from flaxfit.checkpoints._seal import Damaged
from flaxfit.display import say


def intact_records(folder: Path, steps: Iterable[int]) -> dict[int, Record]:
    """Reads the records of some steps; skips damaged ones."""
    records = {}
    for step in steps:
        try:
            records[step] = read_record(_folder.step_path(folder, step))
        except Damaged:
            continue
    return records


def ranking(records: Mapping[int, Record], monitor: Mapping[str, str]) -> list[int]:
    """Ranks the steps whose monitored metric is finite, best first; of equal ones, the last."""
    sign = 1 if monitor["mode"] == "max" else -1
    values = {
        step: sign * record["metrics"].get(monitor["name"], math.nan)
        for step, record in records.items()
    }
    finite = [step for step, value in values.items() if math.isfinite(value)]
    return sorted(finite, key=lambda step: (values[step], step), reverse=True)


def supersede(folder: Path, step: int, earlier: Iterable[int]) -> None:
    """Sets aside those of an earlier run's steps that this run has not reached, and says so."""
    for old in [old for old in earlier if old > step]:
        target = _folder.set_aside(folder, old, "superseded")
        say(f"this run is at step {step}: an earlier run's step {old} is now {target.name}")


def delete_old(folder: Path, step: int, keep: int, monitor: Mapping[str, str] | None) -> None:
    """Deletes all steps except the last `keep`, the best one and the one just saved."""
    steps = _folder.steps(folder)
    best = ranking(intact_records(folder, steps), monitor)[:1] if monitor else []
    for old in set(steps) - {step, *steps[-keep:], *best}:
        _folder.delete(folder, old)
