"""load_orbax: reads the arrays of an Orbax checkpoint without the original pytree."""

import json
import os
from pathlib import Path

from flaxfit.importers._lazy import LazyArray
from flaxfit.importers._tensorstore import file_store, open_stores
from flaxfit.importers._unreadable import reading, require
from flaxfit.tree import Json, local_path

_KIND = "an Orbax checkpoint"
_TREE = "_METADATA"
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")


def is_orbax(path: Path) -> bool:
    """Returns whether a folder is an Orbax checkpoint or one of its steps."""
    return bool(_items(path))


def load_orbax(path: str | os.PathLike[str]) -> dict[str, LazyArray]:
    """Opens the arrays of an Orbax checkpoint, by "/"-joined path.

    The original pytree is not needed: indices of lists and tuples become parts of the paths.
    Scalars become zero-dimensional arrays; strings and None are skipped. Load only files that you
    trust: TensorStore reads their index as it is, and a forged one can allocate much memory. Use
    `flaxfit.checkpoints` for checkpoints that flaxfit wrote; it verifies their checksums.

    >>> load_orbax("no_such_folder")
    Traceback (most recent call last):
    FileNotFoundError: No Orbax checkpoint at no_such_folder: ...

    Args:
      path: the folder of a tree, or of a step that contains one tree.

    Raises:
      FileNotFoundError: the checkpoint does not exist.
      UnreadableFile: it is damaged or in an unsupported format.
    """
    path = local_path(path)
    items = _items(path)
    if len(items) != 1:
        names = ", ".join(item.name for item in items) or "none"
        raise FileNotFoundError(
            f"No Orbax checkpoint at {path}: expected the folder of one tree (with a file "
            f"{_TREE}) or of a step that contains one. Trees found here: {names}."
        )
    folder = items[0]
    with reading(folder, _KIND):
        description = json.loads((folder / _TREE).read_bytes())
        zarr = "zarr3" if description.get("use_zarr3") else "zarr"
        in_one_store = description.get("use_ocdbt", (folder / "manifest.ocdbt").exists())
        one_store = {"driver": "ocdbt", "base": file_store(folder, "")}
        # A missing chunk means zeros, unless the writer also stores zeros: then it is damage.
        is_whole = bool(description.get("store_array_data_equal_to_fill_value"))
        specs: dict[str, dict[str, Json]] = {}
        for entry in description["tree_metadata"].values():
            if entry["value_metadata"]["value_type"] not in _ARRAYS:
                continue
            keys = [str(key["key"]) for key in entry["key_metadata"]]
            name = "/".join(keys)
            require(name not in specs, f"the name {name:.100} occurs twice")
            place = ".".join(keys)
            specs[name] = {
                "driver": zarr,
                "kvstore": one_store | {"path": f"{place}/"}
                if in_one_store
                else file_store(folder, place),
                "fill_missing_data_reads": not is_whole,
            }
    return open_stores(specs, folder, _KIND)


def _items(path: Path) -> list[Path]:
    if (path / _TREE).is_file():
        return [path]
    return sorted(tree.parent for tree in path.glob(f"*/{_TREE}"))
