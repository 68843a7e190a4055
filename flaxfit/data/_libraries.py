"""Iterates over batches of other libraries' data, without importing these libraries."""

import contextvars
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from flaxfit.display import say
from flaxfit.distributed import process_count, process_index
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


def opener(data: Data, options: dict[str, Any]) -> OpenPass | None:
    """Returns a function that opens a pass, for libraries that need it; None for other data.

    The options `batch_size`, `shuffle`, `seed` and `drop_remainder` are for data without batches.
    """
    # First: Hugging Face's iterable dataset inherits from torch's if torch is imported.
    if is_hugging_face(data):
        return lambda epoch: _hugging_face_batches(data, epoch, options)
    if comes_from(data, "torch.utils.data.dataset"):
        raise TypeError(
            f"Cannot read batches from the torch dataset {type(data).__name__}: wrap it, "
            "torch.utils.data.DataLoader(dataset, batch_size=32)."
        )
    if comes_from(data, "torch.utils.data"):
        return lambda epoch: (jax.tree.map(_from_torch, batch) for batch in data)
    if hasattr(data, "as_numpy_iterator"):
        return lambda epoch: data.as_numpy_iterator()
    return _grain_passes(data) if comes_from(data, "grain") else None


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


def _hugging_face_batches(data: Data, epoch: int, options: dict[str, Any]) -> Iterator[PyTree]:
    form = getattr(data, "format", None) or {"type": None, "columns": None}
    # A user's transform makes the batches.
    if form["type"] != "custom":
        columns = {"columns": form["columns"]} if form["columns"] else {}
        data = data.with_format("numpy", **columns)
    if options["shuffle"]:
        data = data.shuffle(generator=np.random.default_rng((options["seed"], epoch)))
    size, drop_remainder = regular_size(options["batch_size"]), options["drop_remainder"]
    return data.iter(size, drop_last_batch=drop_remainder)


def reads_own_shard(data: Data) -> bool:
    """Returns whether the shard options of a Grain loader select this process's shard.

    `grain.sharding.ShardByJaxProcess` makes these options. A sliced data set is not recognized.
    """
    options = getattr(data, "_shard_options", None)
    shard = (getattr(options, "shard_index", None), getattr(options, "shard_count", None))
    return comes_from(data, "grain") and shard == (process_index(), process_count())


def _watching_parent(init: Callable[[], None] | None) -> Callable[[], None]:
    """Wraps a worker's init function to end the worker when its parent ends."""

    def start() -> None:
        # Import here: the function is pickled by value, so no worker imports flaxfit and JAX.
        import multiprocessing
        import os
        import threading

        def watch() -> None:
            parent = multiprocessing.parent_process()
            if parent is not None:
                parent.join()
                os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
        if init is not None:
            init()

    vars(start)["watches_parent"] = True
    return start


def _grain_passes(data: Data) -> OpenPass:
    """Opens passes over a Grain pipeline; the second reports that the random order repeats."""
    nodes = list(_nodes(data))
    for node in nodes:
        # Grain ends its workers only at a normal exit; after a kill they would wait forever.
        if hasattr(node, "_worker_init_fn") and not hasattr(node._worker_init_fn, "watches_parent"):
            node._worker_init_fn = _watching_parent(node._worker_init_fn)
    context = contextvars.copy_context()  # Of this thread, which may have turned notices off.
    names = " ".join(type(node).__name__ for node in nodes)
    notices = [_REPEATS] if "Shuffle" in names or "Random" in names else []

    def open_pass(epoch: int) -> Iterator[Any]:
        if epoch and notices:
            context.run(say, notices.pop())
        return iter(data)

    return open_pass


_REPEATS = (
    "a Grain pipeline that ends has one random order, which each epoch repeats: for new ones, add "
    ".repeat() before it is batched, and pass steps_per_epoch"
)


def _nodes(data: Data) -> Iterator[Any]:
    """Yields each part of a Grain pipeline once."""
    nodes, seen = [data], set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, list | tuple):
            nodes += [each for each in node if not isinstance(each, list | tuple)]
        elif id(node) not in seen and comes_from(node, "grain"):
            seen.add(id(node))
            yield node
            nodes += [*getattr(node, "parents", ()), *getattr(node, "__dict__", {}).values()]
