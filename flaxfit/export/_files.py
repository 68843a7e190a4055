"""Replaces files and folders atomically."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """Yields a temporary path, which replaces `path` unless the block raises.

    Raises:
      FileExistsError: `path` is a folder instead of a file, or a folder of anything but a
        SavedModel.
    """
    path = Path(os.path.abspath(path))
    _check_replaceable(path, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing-{os.getpid()}")
    old = path.with_name(f".{path.name}.replaced-{os.getpid()}")
    try:
        yield temporary
        # Sync before the rename: else a power cut could leave `path` with incomplete content.
        for file in temporary.rglob("*") if folder else [temporary]:
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        if folder and path.exists():
            path.rename(old)  # A folder cannot be renamed onto a folder that is not empty.
        os.replace(temporary, path)
    finally:
        for left in (temporary, old):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def _check_replaceable(path: Path, folder: bool) -> None:
    if not path.exists():
        return
    if not folder:
        if path.is_dir():
            raise FileExistsError(
                f"Cannot write the file {path}: it is a folder. Name a file in it."
            )
        return
    is_empty = path.is_dir() and not any(path.iterdir())
    if not is_empty and not (path / "saved_model.pb").is_file():
        raise FileExistsError(
            f"Cannot write a SavedModel to {path}: it holds something else. Name a new folder."
        )
