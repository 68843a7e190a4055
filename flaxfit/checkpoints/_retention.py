"""Decides which steps to save, and which to keep: the last, and the best by a metric."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flaxfit.checkpoints import _folder
from flaxfit.checkpoints._record import Record, read_record
from flaxfit.checkpoints._seal import Damaged
from flaxfit.display import say
from flaxfit.distributed import from_main
from flaxfit.metrics._monitor import Monitor, check_mode, is_better
from flaxfit.state import Checkpoint
from flaxfit.tree import Json, whole_number


def intact_records(folder: Path, steps: Iterable[int]) -> dict[int, Record]:
    """Reads the records of some steps; skips damaged ones."""
    records = {}
    for step in steps:
        try:
            records[step] = read_record(_folder.step_path(folder, step))
        except Damaged:
            continue
    return records


def newest_history(folder: Path) -> Json:
    """Returns the history of the newest checkpoint with an intact record, or None."""

    def find() -> Json:
        records = (intact_records(folder, [step]) for step in reversed(_folder.steps(folder)))
        return next((each["history"] or {} for record in records for each in record.values()), None)

    return from_main("the newest checkpoint of a folder", find)


def ranking(records: Mapping[int, Record], monitor: Mapping[str, str]) -> list[int]:
    """Ranks steps by the monitored metric, best first (the last of ties); only finite values."""
    sign = 1 if monitor["mode"] == "max" else -1
    values = {
        step: sign * record["metrics"].get(monitor["name"], math.nan)
        for step, record in records.items()
    }
    finite = [step for step, value in values.items() if math.isfinite(value)]
    return sorted(finite, key=lambda step: (values[step], step), reverse=True)


def supersede(folder: Path, step: int, earlier: Iterable[int]) -> None:
    """Renames and reports an earlier run's steps that this run has not reached."""
    for old in [old for old in earlier if old > step]:
        target = _folder.set_aside(folder, old, "superseded")
        say(f"this run is at step {step}: an earlier run's step {old} is now {target.name}")


class Retention:
    """Decides what a `CheckpointFileWriter` saves and keeps; takes its arguments."""

    def __init__(
        self,
        keep: int | None,
        keep_best: int | None,
        monitor: str | None,
        mode: str,
        save_best_only: bool,
        initial_value_threshold: float | None,
    ) -> None:
        for name, value in {"keep": keep, "keep_best": keep_best}.items():
            if value is not None:
                whole_number(name, value, other=None)
        if keep is None and keep_best is not None:
            raise ValueError(f"keep=None keeps all checkpoints: leave out keep_best={keep_best}.")
        if initial_value_threshold is not None and not save_best_only:
            raise ValueError(
                f"initial_value_threshold={initial_value_threshold} needs save_best_only=True: "
                "without it every checkpoint is saved."
            )
        check_mode(mode)
        if monitor is None and (save_best_only or keep_best is not None):
            monitor = "val_loss"
        self._keep, self._keep_best = keep, keep_best or 1
        self._monitor = None if monitor is None else Monitor(monitor, mode, "CheckpointFileWriter")
        self._saves_best_only = save_best_only
        self._threshold = initial_value_threshold
        self.monitor: dict[str, str] | None = None
        """The name and mode of the metric for best steps; known from the first checkpoint on."""

    def attach(self, loop: Any, writer: object) -> None:
        """Checks that a loop reports the metric."""
        if self._monitor is not None:
            self._monitor.attach(loop, writer)

    def look(self, checkpoint: Checkpoint) -> None:
        """Resolves the mode of the metric; reports a checkpoint without the metric."""
        if self._monitor is None:
            return
        self.monitor = {"name": self._monitor.name, "mode": self._monitor.resolve(checkpoint.modes)}
        is_within = checkpoint.sums is not None  # Within an epoch; never the best.
        if self._monitor.name not in checkpoint.metrics and not is_within:
            say(
                f"the checkpoint of step {checkpoint.step} lacks the monitored metric "
                f"{self._monitor.name!r} (it holds {', '.join(checkpoint.metrics) or 'none'}): "
                "it cannot be the best"
            )

    def is_wanted(self, folder: Path, checkpoint: Checkpoint) -> bool:
        """Returns whether to save a checkpoint: with `save_best_only`, if it is a new best.

        Raises:
          ValueError: no checkpoint has the metric.
        """
        if not self._saves_best_only or self._monitor is None:
            return True
        value, mode = self._monitor.read(checkpoint), self._monitor.resolve(checkpoint.modes)
        steps = [step for step in _folder.steps(folder) if step < checkpoint.step]
        records = intact_records(folder, steps)
        name, bests = self._monitor.name, [self._threshold]
        for step in ranking(records, {"name": name, "mode": mode})[:1]:
            bests.append(records[step]["metrics"][name])
        return value is not None and all(is_better(value, best, mode) for best in bests)

    def delete_old(self, folder: Path, step: int) -> None:
        """Deletes all steps except the last, the best and the one just saved."""
        if self._keep is None:
            return
        steps, best = _folder.steps(folder), []
        if self.monitor is not None:
            best = ranking(intact_records(folder, steps), self.monitor)[: self._keep_best]
        # Always keep `step`: with older steps of higher numbers it may not be among the last.
        for old in set(steps) - {step, *steps[-self._keep :], *best}:
            _folder.delete(folder, old)
