"""How to iterate over the batches of other libraries' data; none of them is imported for it."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from flaxfit.tree._checks import whole_number
from flaxfit.tree._types import ArrayLike, Data


def comes_from(data: Data, module: str) -> bool:
    """Whether the type of an object, or one that it inherits from, is of a module.

    >>> comes_from(np.zeros(3), "numpy")
    True
    """
    names = (cls.__module__ + "." for cls in type(data).__mro__)
    return any(name.startswith(module + ".") for name in names)


def regular_size(batch_size: int | None) -> int:
    """The batch size that data sets are cut to.

    >>> regular_size(None), regular_size(8)
    (32, 8)
    """
    return 32 if batch_size is None else whole_number("batch_size", batch_size)


def is_hugging_face(data: Data) -> bool:
    """Whether data is a dataset of Hugging Face, which is cut into batches."""
    return comes_from(data, "datasets") and hasattr(data, "with_format")


def opener(data: Data, **options: Any) -> Callable[[int], Iterator[Any]] | None:
    """A function from the epoch to an iterator over the batches of foreign data, or None.

    Args:
      data: any object.
      **options: `batch_size`, `shuffle`, `seed` and `drop_remainder`, for data without batches.
    """
    # First of all: Hugging Face's iterable dataset inherits from torch's where torch is imported.
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
    """The number of batches in a pass, where the data knows it."""
    if _is_endless(data):
        return sys.maxsize
    try:
        n = len(data)
    except TypeError:
        return None
    if is_hugging_face(data):
        size = regular_size(batch_size)
        n = (n if drop_remainder else n + size - 1) // size
    return n


def _is_endless(data: Data) -> bool:
    """Whether data is a data set of TensorFlow that repeats for ever, whose length is an error."""
    is_tensorflow = hasattr(data, "as_numpy_iterator") and hasattr(data, "cardinality")
    return is_tensorflow and int(data.cardinality()) == -1


def describe(data: Data, *, batch_size: int | None, **options: Any) -> dict[str, Any]:
    """The options that the batches of foreign data, or those of a callable, depend on."""
    if is_hugging_face(data) or (options["shuffle"] and callable(data)):
        return {"batch_size": regular_size(batch_size), **options}
    return {}


def _from_torch(leaf: ArrayLike) -> Any:
    """A tensor as an array over the same memory, as far as it lies on the host."""
    if not comes_from(leaf, "torch"):
        return leaf
    import torch

    tensor = leaf.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(jax.numpy.bfloat16)
    return tensor.numpy()


def _hugging_face_batches(
    data: Data,
    epoch: int,
    *,
    batch_size: int | None,
    shuffle: bool,
    seed: int,
    drop_remainder: bool,
) -> Iterator[Any]:
    form = getattr(data, "format", None) or {"type": None, "columns": None}
    # A transform set by the user makes the batches as they are wanted.
    if form["type"] != "custom":
        columns = {"columns": form["columns"]} if form["columns"] else {}
        data = data.with_format("numpy", **columns)
    if shuffle:
        data = data.shuffle(generator=np.random.default_rng((seed, epoch)))
    return data.iter(regular_size(batch_size), drop_last_batch=drop_remainder)
