"""Shards and worker processes of Grain loaders, found without importing Grain."""

import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from flaxfit.data._libraries import OpenPass, comes_from
from flaxfit.display import say
from flaxfit.distributed import process_count, process_index
from flaxfit.tree import Data


def reads_own_shard(data: Data) -> bool:
    """Whether the shard options of a loader select the shard of this process.

    `grain.sharding.ShardByJaxProcess` makes such options. A slice of a data set is not recognized.
    """
    options = getattr(data, "_shard_options", None)
    shard = (getattr(options, "shard_index", None), getattr(options, "shard_count", None))
    return comes_from(data, "grain") and shard == (process_index(), process_count())


def _watching_parent(init: Callable[[], None] | None) -> Callable[[], None]:
    """The init function of a worker that also watches its parent."""

    def start() -> None:
        # Pickled by value, imports and all: else each worker would import flaxfit and JAX.
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
    """Opens passes over a pipeline; says at the second that its random order repeats."""
    nodes = list(_nodes(data))
    for node in nodes:
        # Grain ends its workers only when this process exits normally: else they wait forever.
        if hasattr(node, "_worker_init_fn") and not hasattr(node._worker_init_fn, "watches_parent"):
            node._worker_init_fn = _watching_parent(node._worker_init_fn)
    context = contextvars.copy_context()  # Notices may be turned off here.
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
    """The parts of a pipeline, without repetition."""
    nodes, seen = [data], set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, list | tuple):
            nodes += [each for each in node if not isinstance(each, list | tuple)]
        elif id(node) not in seen and comes_from(node, "grain"):
            seen.add(id(node))
            yield node
            nodes += [*getattr(node, "parents", ()), *getattr(node, "__dict__", {}).values()]
