"""Handles shards and worker processes of Grain loaders, without importing Grain."""

import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from flaxfit.data._libraries import OpenPass, comes_from
from flaxfit.display import say
from flaxfit.distributed import process_count, process_index
from flaxfit.tree import Data


def reads_own_shard(data: Data) -> bool:
    """Returns whether a loader's shard options select this process's shard.

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


def passes_over(data: Data) -> OpenPass:
    """Opens passes over a pipeline; the second pass reports that the random order repeats."""
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
    """Yields each part of a pipeline once."""
    nodes, seen = [data], set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, list | tuple):
            nodes += [each for each in node if not isinstance(each, list | tuple)]
        elif id(node) not in seen and comes_from(node, "grain"):
            seen.add(id(node))
            yield node
            nodes += [*getattr(node, "parents", ()), *getattr(node, "__dict__", {}).values()]
