"""Files and folders that are replaced whole, or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from flaxfit.tree._checks import local_path


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, folder: bool = False) -> Iterator[Path]:
    """A temporary path beside `path`, which it becomes unless the block raises.

    Raises:
      ValueError: it is a URL.
      FileExistsError: there is something else at `path`: a folder where a file is to be, or a
        folder of anything but a SavedModel.
      ValueError: it is a URL.
    """
    path = Path(os.path.abspath(local_path(path)))
    _check_replaceable(path, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing-{os.getpid()}")
    old = path.with_name(f".{path.name}.replaced-{os.getpid()}")
    try:
        yield temporary
        _sync(temporary)
        if folder and path.exists():
            path.rename(old)  # A folder cannot be renamed onto one that is not empty.
        os.replace(temporary, path)
    finally:
        for left in (temporary, old):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def _check_replaceable(path: Path, folder: bool) -> None:
    if not path.exists():
        return
    if not folder and path.is_dir():
        raise FileExistsError(f"Cannot write the file {path}: it is a folder. Name a file in it.")
    if (
        folder
        and not (path / "saved_model.pb").is_file()
        and (not path.is_dir() or any(path.iterdir()))
    ):
        raise FileExistsError(
            f"Cannot write a SavedModel to {path}: it holds something else. Name a new folder."
        )


def _sync(path: Path) -> None:
    """Waits until a file, or the files of a folder, are on disk."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    for file in files:
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
