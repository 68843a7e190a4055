"""The folder of a run: which steps it holds, and how a step leaves it without being half there."""

import itertools
import os
import re
import shutil
from pathlib import Path

from flaxfit.checkpoints import _orbax, _seal
from flaxfit.tree._checks import local_path

_numbers = itertools.count()
_LEFT_OVER = re.compile(r"(deleted|saving)-\d+-\d+")


def absolute(folder: str | os.PathLike[str]) -> Path:
    """The folder's absolute path: Orbax loses what is saved to a relative one.

    Raises:
      ValueError: it has no name, or is a URL.
    """
    if not os.fspath(folder):
        raise ValueError("A folder of checkpoints needs a name, got ''.")
    return Path(os.path.abspath(local_path(folder)))


def make(folder: Path) -> None:
    """Makes the folder of a run where it is missing.

    Raises:
      OSError: it cannot be made, or not be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written to")


def steps(folder: Path) -> list[int]:
    """The steps that a folder holds, in order; empty and foreign folders are none."""
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if _is_step(entry))


def foreign(folder: Path) -> list[Path]:
    """What has the name of a step and is none: emptied folders, and those of others."""
    if not folder.is_dir():
        return []
    return sorted(e for e in folder.iterdir() if _is_number(e.name) and not _is_step(e))


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / str(int(step))


def begin(folder: Path, step: int) -> Path:
    """Makes the place where a step is written before it is complete.

    It is a new one: what an interrupted save may still be writing cannot come between, even if
    its place was removed.
    """
    while (place := folder / f"saving-{int(step)}-{next(_numbers)}").exists():
        pass
    (place / _orbax.ARRAYS).mkdir(parents=True)
    return place


def complete(folder: Path, step: int, written: Path) -> None:
    """Seals what was written for a step and gives it its name.

    Orbax syncs its arrays only: syncing the rest, and then the rename, makes the step survive a
    power cut.
    """
    path = step_path(folder, step)
    _seal.write(written)
    for parent, _, names in os.walk(written):
        for name in names:
            sync(os.path.join(parent, name))
        sync(parent)
    if path.exists():
        set_aside(folder, step, "replaced" if _is_step(path) else "foreign")
    written.rename(path)
    sync(folder)


def set_aside(folder: Path, step: int, reason: str) -> Path:
    """Renames a step to `<reason>-<step>-<n>`; it is a step no longer, but nothing is lost."""
    n = 0
    while (target := folder / f"{reason}-{step}-{n}").exists():
        n += 1
    return step_path(folder, step).rename(target)


def aside(folder: Path, reason: str) -> list[Path]:
    """The steps that were set aside for a reason."""
    if not folder.is_dir():
        return []
    name = re.compile(rf"{reason}-\d+-\d+")
    return sorted(entry for entry in folder.iterdir() if name.fullmatch(entry.name))


def delete(folder: Path, step: int) -> None:
    """Deletes a step; a kill in the middle leaves no half step behind."""
    shutil.rmtree(set_aside(folder, step, "deleted"), ignore_errors=True)


def tidy(folder: Path) -> None:
    """Ends what a killed process began: removes half saved steps, brings back replaced ones."""
    if not folder.is_dir():
        return
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink() and _LEFT_OVER.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
    for entry in reversed(aside(folder, "replaced")):
        step = int(entry.name.split("-")[1])
        if step_path(folder, step).exists():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.rename(step_path(folder, step))


def _is_step(entry: Path) -> bool:
    if not _is_number(entry.name) or entry.is_symlink():
        return False
    return any((entry / item).is_dir() for item in (_orbax.ARRAYS, _orbax.RECORD))


def _is_number(name: str) -> bool:
    return re.fullmatch("0|[1-9][0-9]{,17}", name) is not None


def sync(path: str | Path) -> None:
    """Has what is known of a file or folder written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
