"""What a completed save has made superfluous: later steps of an earlier run, and old ones."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from flaxfit.checkpoints import _folder
from flaxfit.checkpoints._best import best_step
from flaxfit.display import say


def set_later_aside(folder: Path, step: int, found: Iterable[int]) -> None:
    """Sets those of the steps aside that a run has found and is not yet at, and says so."""
    for old in [old for old in found if old > step]:
        target = _folder.set_aside(folder, old, "superseded")
        say(f"this run is at step {step}: an earlier run's step {old} is now {target.name}")


def delete_old(folder: Path, step: int, keep: int, monitor: Mapping[str, str] | None) -> None:
    """Deletes all steps but the last ones, the best one and the one just saved."""
    steps = _folder.steps(folder)
    kept = {step, *steps[-keep:]}
    best = best_step(folder, steps, monitor) if monitor else None
    for old in set(steps) - kept - {best}:
        _folder.delete(folder, old)
