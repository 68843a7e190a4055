"""Data that is borrowed: given back as it was, whatever was read of it in between."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from flaxfit.data import ArrayStream, as_stream
from flaxfit.data._fit_arguments import prepare
from flaxfit.data._libraries import is_hugging_face, regular_size


def borrowed(
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    batch_size: int | None,
    of_arrays: int | None = None,
    seed: int,
    owner: str,
) -> AbstractContextManager[Any]:
    """A stream of batches that stands, in the end, where it stood.

    >>> import numpy as np
    >>> stream = ArrayStream(np.arange(8), batch_size=2)
    >>> with borrowed(stream, None, None, batch_size=2, seed=0, owner="a test") as batches:
    ...     _ = next(batches)
    >>> next(stream)[0].tolist()
    [0, 1]

    Args:
      x: inputs, or anything that gives batches again and again.
      y: targets, where `x` is arrays.
      sample_weight: one weight per example.
      batch_size: examples in a batch of a data set; None: 32.
      of_arrays: examples in a batch of arrays, in place of `batch_size`.
      seed: of their order.
      owner: who borrows them, for the message.

    Raises:
      ValueError: the data can be passed over only once.
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
            f"{owner} would use up this data, which can be passed over only once: give arrays, "
            "a list of batches or a loader."
        )
    return _given_back(stream)


@contextmanager
def _given_back(stream: Any) -> Iterator[Any]:
    position = stream.get_state() if hasattr(stream, "get_state") else None
    try:
        yield stream
    finally:
        if position is not None:
            stream.set_state(position)
