"""load_t5x: reads the checkpoints that T5X writes, in the old and the new layout."""

import os
from pathlib import Path

import numpy as np
from flax import serialization

from flaxfit.importers._lazy import LazyArray
from flaxfit.importers._msgpack import as_lazy, leaves
from flaxfit.importers._tensorstore import file_store, open_stores
from flaxfit.importers._unreadable import UnreadableFile, reading, require
from flaxfit.tree import ArrayLike, Json, PyTree, local_path

_KIND = "a T5X checkpoint"
_INDEX = "checkpoint"
_PLACEHOLDER = "PLACEHOLDER://"


def is_t5x(path: Path) -> bool:
    """Returns whether a path is a T5X checkpoint: its index is a MessagePack map."""
    index = path / _INDEX if path.is_dir() else path
    if not index.is_file():
        return False
    with index.open("rb") as file:
        first = file.read(1)
    return b"\x80" <= first <= b"\x8f" or first in (b"\xde", b"\xdf")


def load_t5x(path: str | os.PathLike[str]) -> dict[str, LazyArray]:
    """Opens a checkpoint of T5X: `target/...`, `state/step`, `state/param_states/...`.

    Names of the old layout (`optimizer/target/...`) are converted to the new ones. uint16 means
    bfloat16, as old versions stored it. Arrays inside the index file are read at once.

    >>> load_t5x("no_such_folder/checkpoint_1000")
    Traceback (most recent call last):
    FileNotFoundError: No T5X checkpoint at no_such_folder/checkpoint_1000: ...

    Args:
      path: the folder of one step, or a checkpoint in a single file.

    Raises:
      FileNotFoundError: the checkpoint does not exist.
      UnreadableFile: it is damaged or in an unsupported format.
    """
    path = local_path(path)
    folder, index = (path, path / _INDEX) if path.is_dir() else (path.parent, path)
    if not index.is_file():
        raise FileNotFoundError(
            f"No T5X checkpoint at {path}: expected a folder that contains a file named {_INDEX}."
        )
    if not is_t5x(path):
        raise UnreadableFile(f"Cannot read {index}: it is not the index of {_KIND}.")
    arrays: dict[str, LazyArray] = {}
    specs: dict[str, dict[str, Json]] = {}
    with reading(index, _KIND):
        tree = serialization.msgpack_restore(index.read_bytes())
        for old_name, leaf in leaves(tree, is_leaf=_is_spec):
            name = old_name.removeprefix("optimizer/")
            require(name not in arrays and name not in specs, f"{name:.100} occurs twice")
            if isinstance(leaf, dict):
                specs[name] = {"driver": "zarr", "kvstore": file_store(folder, _folder_of(leaf))}
            elif isinstance(leaf, str) and leaf.startswith(_PLACEHOLDER):
                store = file_store(folder, leaf.removeprefix(_PLACEHOLDER))
                specs[name] = {"driver": "zarr", "kvstore": store}
            elif name != "version" and not isinstance(leaf, str):
                arrays[name] = _as_lazy(leaf)
    if specs:
        arrays |= open_stores(specs, folder, _KIND, old_bfloat16=True)
    return arrays


def _is_spec(tree: PyTree) -> bool:
    named = tree if isinstance(tree, dict) else {}
    return isinstance(named.get("driver"), str) and isinstance(named.get("kvstore"), dict)


def _folder_of(spec: dict[str, Json]) -> str:
    """Returns the folder of an array: the last part of the path it was written to."""
    require(spec["driver"] == "zarr", f"an array has the unknown driver {spec['driver']:.100}")
    path = spec["kvstore"].get("path") or spec.get("path") or ""
    name = str(path).rstrip("/").rpartition("/")[2]
    require(name not in ("", ".", ".."), "an array has no folder")
    return name


def _as_lazy(leaf: ArrayLike) -> LazyArray:
    lazy = as_lazy(leaf)
    is_bfloat16 = lazy.dtype == np.uint16
    return lazy.map(lambda array: array.view("bfloat16")) if is_bfloat16 else lazy
