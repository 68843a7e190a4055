"""Which data a position belongs to: described where it is saved, compared where restored."""

from collections.abc import Mapping
from typing import Any

import jax


def describe_batch(batch: Any) -> list[str]:
    """The dtypes, lengths and ranks of the arrays of a batch.

    Not their other dimensions: a loader that pads each batch to its longest row has new ones with
    each order.

    >>> describe_batch((jax.numpy.zeros((8, 28, 28)), [3]))
    ['float32[8, :, :]', 'int']
    """
    return [_describe(leaf) for leaf in jax.tree.leaves(batch)]


def check_description(
    saved: Mapping[str, Any], here: Mapping[str, Any], *, but_for: str | None = None
) -> None:
    """Checks that a position belongs to the data at hand, as far as it is described.

    Args:
      saved: the description that was saved with the position.
      here: that of the data at hand.
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


def _describe(leaf: Any) -> str:
    shape = getattr(leaf, "shape", None)
    if shape is None or not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype}[{', '.join([*map(str, shape[:1]), *[':'] * len(shape[1:])])}]"
