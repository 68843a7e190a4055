"""Positions in data: the data and the processes that they belong to."""

import re
from collections.abc import Mapping

import jax

from flaxfit.distributed import exchange, process_count, process_index
from flaxfit.tree import ArrayLike, Json, PyTree

_EACH = "of_each_process"


def describe_batch(batch: PyTree) -> list[str]:
    """The dtypes, lengths and ranks of the arrays of a batch, such as "float32[8, :, :]".

    Other dimensions may change with the order, if a loader pads each batch to its longest row.
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
    """Checks the description saved with a position against that of the present data.

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
    """Joins the positions of all processes, all of which must call it, to one if they are equal."""
    each = exchange("the position in the data", position, seconds=3600)
    is_one = len({*map(position_text, each)}) == 1
    return each[0] if is_one else {_EACH: each}


def position_text(position: Json) -> str:
    """A position as a text that is equal in all processes at that position.

    Grain's positions hold the `repr` of their source, which may contain an address.
    """
    return re.sub(" at 0x[0-9a-f]+", "", str(position))


def own_position(position: Json) -> Json:
    """This process's part of a joined position, or all of it if it has another number of parts."""
    is_joined = isinstance(position, Mapping) and _EACH in position
    if not is_joined or len(position[_EACH]) != process_count():
        return position
    return position[_EACH][process_index()]


def check_own(position: Mapping[str, Json]) -> None:
    """Checks that a position does not join those of another number of processes."""
    if _EACH in position:
        n, now = len(position[_EACH]), process_count()
        raise ValueError(
            f"Cannot resume with {now} process{'es' * (now > 1)}, since each of {n} read its own "
            f"share of the data, at its own position. Start {n} processes, or read the data from "
            "its beginning: TrainLoop(checkpoints.restore(folder, state), ...). Arrays can be "
            "resumed with any number of processes."
        )
