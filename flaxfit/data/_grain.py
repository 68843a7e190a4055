"""What a Grain pipeline tells of itself, without Grain being imported for it."""

from collections.abc import Callable, Iterator
from typing import Any

from flaxfit.data._libraries import comes_from
from flaxfit.distributed._processes import process_count, process_index


def is_divided(data: Any) -> bool:
    """Whether a pipeline reads a share of its own in each process.

    It does by options of several shards, as of `grain.sharding.ShardByJaxProcess`, and by a slice
    `[process_index::process_count]`.

    >>> is_divided([1, 2])
    False
    """
    nodes = _nodes(data)
    return any(getattr(node, "shard_count", 1) > 1 or _is_own_slice(node) for node in nodes)


def end_workers_with_parent(data: Any) -> None:
    """Has the worker processes of a pipeline end with this process, also where it is killed.

    Grain tells them to end when this process ends by itself; else they would wait for ever.

    >>> end_workers_with_parent([1, 2])
    """
    for node in _nodes(data):
        if hasattr(node, "_worker_init_fn"):
            init = node._worker_init_fn
            if not hasattr(init, "watches_parent"):
                node._worker_init_fn = _watching_parent(init)


def _watching_parent(init: Callable[[], None] | None) -> Callable[[], None]:
    """What a worker is to begin with, in place of `init`."""

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

    start.watches_parent = True  # pyright: ignore[reportFunctionMemberAccess]
    return start


def _nodes(data: Any) -> Iterator[Any]:
    """The parts of a pipeline, each once."""
    nodes, seen = [data], set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, list | tuple):
            nodes += [each for each in node if not isinstance(each, list | tuple)]
        elif id(node) not in seen and comes_from(node, "grain"):
            seen.add(id(node))
            yield node
            nodes += [*getattr(node, "parents", ()), *getattr(node, "__dict__", {}).values()]


def _is_own_slice(node: Any) -> bool:
    own = (process_index(), process_count())
    return own[1] > 1 and (getattr(node, "_start", None), getattr(node, "_step", None)) == own
