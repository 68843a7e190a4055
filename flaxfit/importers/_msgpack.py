"""load_msgpack: reads the files that `flax.serialization.to_bytes` produces."""

import os
from collections.abc import Callable, Iterator

import numpy as np
from flax import serialization

from flaxfit.importers._lazy import LazyArray, LazyThreadPoolArray
from flaxfit.importers._unreadable import as_dtype, reading, require
from flaxfit.tree import ArrayLike, PyTree, local_path


def load_msgpack(path: str | os.PathLike[str]) -> dict[str, LazyArray]:
    """Reads a file that `flax.serialization.to_bytes` produced; arrays by "/"-joined path.

    The whole file is read at once. Scalars become zero-dimensional arrays; strings and None are
    skipped.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "weights.msgpack")
    >>> _ = path.write_bytes(serialization.to_bytes({"dense": {"bias": np.ones(3)}}))
    >>> load_msgpack(path)
    {'dense/bias': LazyThreadPoolArray(shape=(3,), dtype=float64)}

    Raises:
      FileNotFoundError: the file does not exist.
      UnreadableFile: it is damaged or another kind of MessagePack file.
    """
    path = local_path(path)
    with reading(path, "a MessagePack file of Flax"):
        tree = serialization.msgpack_restore(path.read_bytes())
        require(isinstance(tree, dict), "it is not a dict")
        arrays: dict[str, LazyArray] = {}
        for name, leaf in leaves(tree):
            if isinstance(leaf, str):
                continue
            require(name not in arrays, f"the name {name:.100} occurs twice")
            arrays[name] = as_lazy(leaf)
        return arrays


def as_lazy(leaf: ArrayLike) -> LazyArray:
    """Converts a numeric array or scalar to a lazy array."""
    array = np.asarray(leaf)
    as_dtype(array.dtype.name)
    return LazyThreadPoolArray(array.shape, array.dtype, lambda: array)


def leaves(
    tree: PyTree, path: str = "", is_leaf: Callable[[PyTree], bool] = lambda tree: False
) -> Iterator[tuple[str, PyTree]]:
    """Yields the leaves of nested dicts and lists by "/"-joined path, except None."""
    if isinstance(tree, dict | list) and not is_leaf(tree):
        for name, branch in tree.items() if isinstance(tree, dict) else enumerate(tree):
            require(isinstance(name, str | int), f"it has the key {name!r:.100}")
            yield from leaves(branch, f"{path}/{name}" if path else str(name), is_leaf)
    elif tree is not None:
        yield path, tree
