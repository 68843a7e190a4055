"""The differences between the arrays of a file and those of a model, in words."""

import difflib
from collections.abc import Mapping
from typing import Any

from flaxfit.checkpoints._tree import Description, describe, leaves_of


def check_fits(
    on_disk: Mapping[str, Description],
    here: Mapping[str, Description],
    source: Any,
    *,
    advice: str = "Build the model and the optimizer that wrote it, with the same freeze, ema and "
    "clip_norm, or start in another folder.",
) -> None:
    """Refuses a file whose arrays differ from a template in name, shape or dtype.

    Args:
      on_disk: descriptions of the file's arrays by path.
      here: descriptions of the template's arrays by path.
      source: the name of the file, for the message.
      advice: what to do.

    Raises:
      ValueError: every difference, one a line, both sides.
    """
    found = differences(on_disk, here)
    if found:
        lines = "".join(f"\n  {line}" for line in found)
        noun = "difference" if len(found) == 1 else "differences"
        raise ValueError(
            f"The checkpoint {source} does not fit this model ({len(found)} {noun}):{lines}\n"
            f"{advice}"
        )


def check_params(loaded: Any, here: Any, source: Any) -> None:
    """Checks that parameters that were loaded are those of a model.

    Raises:
      ValueError: every difference, one a line, both sides.
    """
    on_disk, expected = (
        {f"params/{name}": describe(leaf) for name, leaf in leaves_of(tree).items()}
        for tree in (loaded, here)
    )
    check_fits(on_disk, expected, source, advice="Load it into the model that was saved.")


def differences(on_disk: Mapping[str, Description], here: Mapping[str, Description]) -> list[str]:
    """What differs between two sets of described arrays, a line each.

    >>> scale = {"shape": [4], "dtype": "float32"}
    >>> differences({"a/scale": scale}, {"a/scale": {**scale, "shape": [8]}})
    ['a/scale is float32 (4,) on disk, float32 (8,) here']
    >>> differences({"a/scale": scale}, {})
    ['a/scale is on disk, not here']
    """
    only_disk = [path for path in on_disk if path not in here]
    only_here = [path for path in here if path not in on_disk]
    lines = [
        f"{path} is {_words(on_disk[path])} on disk, {_words(here[path])} here"
        for path in on_disk
        if path in here and _words(on_disk[path]) != _words(here[path])
    ]
    lines += [f"{path} is here, not on disk{_nearest(path, only_disk)}" for path in only_here]
    lines += [f"{path} is on disk, not here{_nearest(path, only_here)}" for path in only_disk]
    return lines


def _words(description: Description) -> str:
    return f"{description['dtype']} {tuple(description['shape'])}"


def _nearest(path: str, others: list[str]) -> str:
    close = difflib.get_close_matches(path, others, n=1, cutoff=0.8)
    return f" (nearest: {close[0]})" if close else ""
