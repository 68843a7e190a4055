"""The failure of a save: in words, and known to all processes."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from flaxfit.checkpoints._record import first_line
from flaxfit.distributed._processes import exchange
from flaxfit.tree._types import PyTree


def cannot_save(
    folder: Path, step: int, arrays: Mapping[str, PyTree], error: Exception
) -> RuntimeError:
    """The error that tells what could not be saved where, and how much room there is."""
    needed = sum(array.nbytes for array in arrays.values())
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return RuntimeError(
        f"Cannot save the checkpoint of step {step} in {folder}: "
        f"{type(error).__name__}: {error}\n(It needs up to {needed:,} bytes, {free:,} are "
        "free.) The steps saved before are as they were."
    )


def tell_all(topic: str, failure: Exception | None) -> None:
    """Waits until all processes have written their part; the failure of one is everyone's."""
    said = failure and first_line(failure)
    told = exchange(f"the arrays of a save {topic}", said, seconds=3600)
    if failure is not None:
        raise failure
    if others := [text for text in told if text]:
        raise RuntimeError(f"On another process: {others[0]}")
