"""Which data a position belongs to, and which process: told where saved, looked at on return."""

import re
from collections.abc import Mapping
from typing import Any

import jax

from flaxfit.distributed._processes import exchange, process_count, process_index
from flaxfit.tree._types import ArrayLike, Json, PyTree

_EACH = "of_each_process"


def describe_batch(batch: PyTree) -> list[str]:
    """The dtypes, lengths and ranks of the arrays of a batch.

    Not their other dimensions: a loader that pads each batch to its longest row has new ones with
    each order.

    >>> describe_batch((jax.numpy.zeros((8, 28, 28)), [3]))
    ['float32[8, :, :]', 'int']
    """
    return [_describe(leaf) for leaf in jax.tree.leaves(batch)]


def check_description(
    saved: Mapping[str, Json], here: Mapping[str, Json], *, but_for: str | None = None
) -> None:
    """Checks that a position belongs to the present data, as far as it is described.

    Args:
      saved: the description that was saved with the position.
      here: that of the present data.
      but_for: what may differ.

    Raises:
      ValueError: with both descriptions, where they differ.
    """
    if {**saved, but_for: None} != {**here, but_for: None}:
        raise ValueError(
            "Cannot go on in other data than the position was saved in:\n"
            f"  saved: {dict(saved)}\n"
            f"  here:  {dict(here)}\n"
            "Use the same data and settings, or start without the saved position."
        )


def joined_position(position: Json) -> Any:
    """The positions of all processes as one: where they differ, it holds each of them.

    All processes must call it.

    >>> joined_position({"epoch": 1})
    {'epoch': 1}
    """
    each = exchange("the position in the data", position, seconds=3600)
    is_one = len({*map(position_text, each)}) == 1
    return each[0] if is_one else {_EACH: each}


def position_text(position: Json) -> str:
    """A position as a text that is the same in all processes that are at it.

    Grain's name their source by its `repr`, which may hold an address.

    >>> position_text({"source": "<Source object at 0x7f01>"})
    "{'source': '<Source object>'}"
    """
    return re.sub(" at 0x[0-9a-f]+", "", str(position))


def own_position(position: Json) -> Any:
    """The part of a joined position that is this process's; all of it, if it is of other ones.

    >>> own_position({"epoch": 1})
    {'epoch': 1}
    """
    is_joined = isinstance(position, Mapping) and _EACH in position
    if not is_joined or len(position[_EACH]) != process_count():
        return position
    return position[_EACH][process_index()]


def check_own(position: Mapping[str, Json]) -> None:
    """Checks that a position is not one of several processes, and of another number than here.

    Raises:
      ValueError: it is.
    """
    if _EACH in position:
        n, now = len(position[_EACH]), process_count()
        raise ValueError(
            f"Cannot resume with {now} process{'es' * (now > 1)}, since each of {n} read its own "
            f"share of the data, at its own position. Start {n} processes, or read the data from "
            "its beginning: TrainLoop(checkpoints.restore(folder, state), ...). Arrays can be "
            "resumed with any number of processes."
        )


def _describe(leaf: ArrayLike) -> str:
    shape = getattr(leaf, "shape", None)
    if shape is None or not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype}[{', '.join([*map(str, shape[:1]), *[':'] * len(shape[1:])])}]"
