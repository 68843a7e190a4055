"""What a Grain pipeline tells of itself, without Grain being imported for it."""

from typing import Any

from flaxfit._processes import process_count, process_index
from flaxfit.data._libraries import comes_from


def is_divided(data: Any) -> bool:
    """Whether a pipeline reads a share of its own in each process.

    It does by options of several shards, as of `grain.sharding.ShardByJaxProcess`, and by a slice
    `[process_index::process_count]`.

    >>> is_divided([1, 2])
    False
    """
    nodes, seen = [data], set()
    while nodes:
        node = nodes.pop()
        if id(node) in seen or not comes_from(node, "grain"):
            continue
        seen.add(id(node))
        if getattr(node, "shard_count", 1) > 1 or _is_own_slice(node):
            return True
        nodes += [*getattr(node, "parents", ()), *getattr(node, "__dict__", {}).values()]
    return False


def _is_own_slice(node: Any) -> bool:
    own = (process_index(), process_count())
    return own[1] > 1 and (getattr(node, "_start", None), getattr(node, "_step", None)) == own
