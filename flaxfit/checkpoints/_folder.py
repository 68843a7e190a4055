"""The folder of a run: lists its steps, and adds, renames or deletes a step atomically."""

import contextlib
import itertools
import os
import re
import shutil
from pathlib import Path

from flaxfit.checkpoints import _orbax, _seal
from flaxfit.tree import local_path

_numbers = itertools.count()
_LEFT_OVER = re.compile(r"(deleted|saving)-\d+-\d+")


def absolute(folder: str | os.PathLike[str]) -> Path:
    """Returns the folder's absolute path: Orbax loses saves to a relative path."""
    if not os.fspath(folder):
        raise ValueError("A folder of checkpoints needs a name, got ''.")
    return Path(os.path.abspath(local_path(folder)))


def make(folder: Path) -> None:
    """Makes the folder of a run if it is missing."""
    if folder.is_file():
        raise NotADirectoryError(
            f"Checkpoints go into a folder, and {folder} is a file: pass another path."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(
            error.errno,
            f"Cannot make the checkpoint folder ({error.strerror}): pass another path",
            str(folder),
        ) from error


def steps(folder: Path) -> list[int]:
    """Returns the steps in a folder, in order, ignoring empty and foreign folders."""
    found = {step_of(entry.name) for entry in _entries(folder) if _is_step(entry)}
    return sorted(step for step in found if step is not None)


def foreign(folder: Path) -> list[Path]:
    """Returns the entries that are named like steps, but are empty or foreign."""
    named = (entry for entry in _entries(folder) if step_of(entry.name) is not None)
    return sorted(entry for entry in named if not _is_step(entry))


def step_name(step: int, name: str = "") -> str:
    """Returns the name of the folder of a step: its number, and a name after "@"."""
    return f"{int(step)}@{name}" if name else str(int(step))


def step_of(name: str) -> int | None:
    """Returns the step that a folder's name denotes, or None."""
    number = name.partition("@")[0]
    return int(number) if re.fullmatch("0|[1-9][0-9]{,17}", number) else None


def step_path(folder: Path, step: int) -> Path:
    """Returns the folder of a step; if there is none, the folder named by its number."""
    found = sorted(entry for entry in _entries(folder) if step_of(entry.name) == step)
    return next(filter(_is_step, found), [folder / step_name(step), *found][-1])


def of_run(folder: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a run's folder; rejects templates."""
    if template := re.search(r"\{\w+(:[^}]*)?\}", os.fspath(folder)):
        raise ValueError(
            f"The name of a checkpoint folder cannot be a template, got {template[0]} in "
            f"{os.fspath(folder)!r}: pass the folder alone, in which each step has a folder, and "
            "the template of their names as name=."
        )
    return absolute(folder)


def begin(folder: Path, step: int) -> Path:
    """Makes a temporary folder for a step.

    Its name is new: an interrupted save may still write to an old one.
    """
    # Check here: Orbax's threads would wait for minutes.
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written to")
    while (written := folder / f"saving-{int(step)}-{next(_numbers)}").exists():
        pass
    (written / _orbax.ARRAYS).mkdir(parents=True)
    return written


def complete(path: Path, step: int, written: Path) -> None:
    """Seals a written step and renames it to its path.

    Orbax syncs only its arrays. After a power cut the step exists only if everything in it was on
    disk before the rename, so sync the files and folders first, and the rename after.
    """
    folder = path.parent
    _seal.write(written)
    for parent, names in _seal.walk(written):
        for name in names:
            sync(os.path.join(parent, name))
        sync(parent)
    # A kill between these renames leaves no step, but a `replaced-` one that `tidy` restores.
    while (old := step_path(folder, step)).exists():
        set_aside(folder, step, "replaced" if _is_step(old) else "foreign")
    written.rename(path)
    sync(folder)


def set_aside(folder: Path, step: int, reason: str) -> Path:
    """Renames a step to `<reason>-<step>-<n>`, which readers ignore."""
    n = 0
    while (target := folder / f"{reason}-{step}-{n}").exists():
        n += 1
    return step_path(folder, step).rename(target)


def aside(folder: Path, reason: str) -> list[Path]:
    """Returns the steps that were set aside for this reason."""
    name = re.compile(rf"{reason}-\d+-\d+")
    return sorted(entry for entry in _entries(folder) if name.fullmatch(entry.name))


def delete(folder: Path, step: int) -> None:
    """Renames a step, then deletes it: a kill in between leaves no partial step."""
    shutil.rmtree(set_aside(folder, step, "deleted"), ignore_errors=True)


def remove(folder: Path) -> None:
    """Deletes all steps, and the folder if nothing else is in it."""
    for step in steps(folder):
        delete(folder, step)
    tidy(folder)
    with contextlib.suppress(OSError):
        folder.rmdir()


def tidy(folder: Path) -> None:
    """Cleans up after a killed process: removes partial steps, restores replaced ones."""
    for entry in _entries(folder):
        if entry.is_dir() and not entry.is_symlink() and _LEFT_OVER.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
    # Last first: of several copies of a step, the last one is restored.
    for entry in reversed(aside(folder, "replaced")):
        step = int(entry.name.split("-")[1])
        if step_path(folder, step).exists():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.rename(step_path(folder, step))


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _is_step(entry: Path) -> bool:
    if step_of(entry.name) is None or entry.is_symlink():
        return False
    return any((entry / item).is_dir() for item in (_orbax.ARRAYS, _orbax.RECORD))


def space(folder: Path, needed: int) -> str:
    """Returns "<needed> bytes, <n> are free", for the disk of a folder."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return f"{needed:,} bytes, {shutil.disk_usage(existing).free:,} are free"


def sync(path: str | Path) -> None:
    """Flushes a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
