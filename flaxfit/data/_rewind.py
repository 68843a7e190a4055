"""Data that is read for a while and then moved back to its position."""

import contextlib
from collections.abc import Iterator
from typing import Any

from flaxfit.data import ArrayStream, as_stream
from flaxfit.data._fit_arguments import prepare
from flaxfit.data._libraries import is_hugging_face, regular_size
from flaxfit.tree._types import Data, PyTree


@contextlib.contextmanager
def borrowed(
    x: Data,
    y: PyTree,
    sample_weight: PyTree,
    *,
    batch_size: int | None,
    of_arrays: int | None = None,
    seed: int,
    owner: str,
) -> Iterator[Any]:
    """A stream of batches, in random order, that is moved back to its position at the end.

    `of_arrays` replaces the batch size for arrays. `owner` names the borrower in the error for data
    that can be iterated only once.
    """
    data = prepare(x, y, sample_weight)[0]
    if isinstance(data, tuple):
        size = regular_size(of_arrays or batch_size)
        stream = ArrayStream(*data, batch_size=size, shuffle=True, seed=seed)
    else:
        shuffle = is_hugging_face(data)
        stream = as_stream(data, batch_size=batch_size, shuffle=shuffle, seed=seed)
    if not getattr(stream, "is_repeatable", True):
        raise ValueError(
            f"{owner} would consume this data, which can be iterated only once: pass arrays, a "
            "list of batches or a loader."
        )
    position = stream.get_state() if hasattr(stream, "get_state") else None
    try:
        yield stream
    finally:
        if position is not None:
            stream.set_state(position)
