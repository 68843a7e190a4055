"""Positions in data: the data and the processes that they belong to."""

import re
from collections.abc import Mapping

import jax

from flaxfit.distributed import exchange, process_count, process_index
from flaxfit.tree import ArrayLike, Json, PyTree

_EACH = "of_each_process"


def describe_batch(batch: PyTree) -> list[str]:
    """Returns dtypes, lengths and ranks of the arrays of a batch, such as "float32[8, :, :]".

    Other dimensions depend on the order if a loader pads each batch to its longest row.
    """

    def describe(leaf: ArrayLike) -> str:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            return type(leaf).__name__
        shape = [*map(str, leaf.shape[:1]), *[":"] * len(leaf.shape[1:])]
        return f"{leaf.dtype}[{', '.join(shape)}]"

    return [describe(leaf) for leaf in jax.tree.leaves(batch)]


def check_description(
    saved: Mapping[str, Json], here: Mapping[str, Json], *, but_for: str | None = None
) -> None:
    """Checks the description saved with a position against the current data.

    The item `but_for` may differ.
    """
    if {**saved, but_for: None} != {**here, but_for: None}:
        raise ValueError(
            "Cannot resume in other data than the position was saved in:\n"
            f"  saved: {dict(saved)}\n"
            f"  here:  {dict(here)}\n"
            "Use the same data and settings, or start without the saved position."
        )


def joined_position(position: Json) -> Json:
    """Merges the positions of all processes if they agree; every process must call it."""
    each = exchange("the position in the data", position, seconds=3600)
    is_one = len({*map(position_text, each)}) == 1
    return each[0] if is_one else {_EACH: each}


def position_text(position: Json) -> str:
    """Converts a position to text that is equal in all processes.

    Grain's positions hold the `repr` of their source, which may contain a memory address.
    """
    return re.sub(" at 0x[0-9a-f]+", "", str(position))


def own_position(position: Json) -> Json:
    """Returns this process's part of a joined position, or all if the number of parts differs."""
    is_joined = isinstance(position, Mapping) and _EACH in position
    if not is_joined or len(position[_EACH]) != process_count():
        return position
    return position[_EACH][process_index()]


def check_own(position: Mapping[str, Json]) -> None:
    """Checks that a position is not joined from another number of processes."""
    if _EACH in position:
        n, now = len(position[_EACH]), process_count()
        raise ValueError(
            f"Cannot resume with {now} process{'es' * (now > 1)}: each of {n} processes had read "
            f"its own part of the data. Start {n} processes, or read the data from "
            "its beginning: TrainLoop(checkpoints.restore(folder, state), ...). Arrays can be "
            "resumed with any number of processes."
        )
