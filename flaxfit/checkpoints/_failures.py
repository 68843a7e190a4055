"""What a save says that failed, on this process or on another one."""

from collections.abc import Mapping
from pathlib import Path

from flaxfit.checkpoints import _folder
from flaxfit.checkpoints._record import first_line
from flaxfit.distributed._processes import exchange
from flaxfit.tree._types import Array


def cannot_save(
    folder: Path, step: int, arrays: Mapping[str, Array], error: Exception
) -> RuntimeError:
    """The error of a save that failed, with the bytes that it needs."""
    space = _folder.space(folder, sum(array.nbytes for array in arrays.values()))
    failure = RuntimeError(
        f"Cannot save the checkpoint of step {step} in {folder}: {type(error).__name__}: {error}\n"
        f"(It needs up to {space}.) Earlier steps are unchanged."
    )
    failure.__cause__ = error
    return failure


def raise_on_all(topic: str, failure: Exception | None) -> None:
    """Waits until all processes have written their part; raises a failure of any of them."""
    reported = exchange(
        f"the arrays of a save {topic}", failure and first_line(failure), seconds=3600
    )
    if failure is not None:
        raise failure
    if others := [text for text in reported if text]:
        raise RuntimeError(f"On another process: {others[0]}")
