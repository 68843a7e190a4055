"""Iterates over batches of other libraries' data, without importing these libraries."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from flaxfit.tree import ArrayLike, Data, PyTree, of_torch, whole_number

OpenPass = Callable[[int], Iterator[PyTree]]
"""Returns an iterator over the batches of an epoch."""


def comes_from(data: object, module: str) -> bool:
    """Returns whether the type of an object, or a base type, is defined in a module."""
    names = (cls.__module__ + "." for cls in type(data).__mro__)
    return any(name.startswith(module + ".") for name in names)


def regular_size(batch_size: int | None) -> int:
    """Returns the batch size of data sets, 32 unless given."""
    return 32 if batch_size is None else whole_number("batch_size", batch_size)


def is_hugging_face(data: Data) -> bool:
    """Returns whether data is a Hugging Face dataset, which has no batches of its own."""
    return comes_from(data, "datasets") and hasattr(data, "with_format")


def opener(data: Data, **options: Any) -> OpenPass | None:
    """Returns a function that opens a pass, for libraries that need it; None for other data.

    The options `batch_size`, `shuffle`, `seed` and `drop_remainder` are for data without batches.
    """
    # First: Hugging Face's iterable dataset inherits from torch's if torch is imported.
    if is_hugging_face(data):
        return lambda epoch: _hugging_face_batches(data, epoch, **options)
    if comes_from(data, "torch.utils.data.dataset"):
        raise TypeError(
            f"Cannot read batches from the torch dataset {type(data).__name__}: wrap it, "
            "torch.utils.data.DataLoader(dataset, batch_size=32)."
        )
    if comes_from(data, "torch.utils.data"):
        return lambda epoch: (jax.tree.map(_from_torch, batch) for batch in data)
    if hasattr(data, "as_numpy_iterator"):
        return lambda epoch: data.as_numpy_iterator()
    return None


def length(data: Data, batch_size: int | None, drop_remainder: bool) -> int | None:
    """Returns the number of batches in a pass, if the data knows it."""
    # The length of an endless data set of TensorFlow is an error.
    is_tensorflow = hasattr(data, "as_numpy_iterator") and hasattr(data, "cardinality")
    if is_tensorflow and int(data.cardinality()) == -1:
        return sys.maxsize
    try:
        n = len(data)
    except TypeError:
        return None
    if is_hugging_face(data):
        size = regular_size(batch_size)
        n = (n if drop_remainder else n + size - 1) // size
    return n


def _from_torch(leaf: ArrayLike) -> ArrayLike:
    return of_torch(leaf) if comes_from(leaf, "torch") else leaf


def _hugging_face_batches(
    data: Data,
    epoch: int,
    *,
    batch_size: int | None,
    shuffle: bool,
    seed: int,
    drop_remainder: bool,
) -> Iterator[PyTree]:
    form = getattr(data, "format", None) or {"type": None, "columns": None}
    # A user's transform makes the batches.
    if form["type"] != "custom":
        columns = {"columns": form["columns"]} if form["columns"] else {}
        data = data.with_format("numpy", **columns)
    if shuffle:
        data = data.shuffle(generator=np.random.default_rng((seed, epoch)))
    return data.iter(regular_size(batch_size), drop_last_batch=drop_remainder)
