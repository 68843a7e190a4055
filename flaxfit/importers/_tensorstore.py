"""Lazy arrays in Zarr stores, which T5X and Orbax write."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flaxfit.importers._lazy import LazyArray, LazyAwaitableArray
from flaxfit.importers._unreadable import reading, require
from flaxfit.tree import Json

_MOST_GROWTH = 1000
_ALWAYS_FINE = 1 << 28
_MOST_CHUNKS = 1 << 20


def file_store(folder: Path, name: str) -> dict[str, Json]:
    """Returns the spec of the store of an array with its own folder."""
    place = (folder / name).resolve()
    require(place.is_relative_to(folder.resolve()), f"{name:.100} lies outside of the folder")
    return {"driver": "file", "path": f"{place}/"}


def open_stores(
    specs: Mapping[str, Mapping[str, Json]], folder: Path, kind: str, *, old_bfloat16: bool = False
) -> dict[str, LazyArray]:
    """Opens TensorStore specs concurrently; returns lazy arrays by name.

    `old_bfloat16` reads uint16 as bfloat16. `folder` and `kind` are for messages.
    """
    import tensorstore

    with reading(folder, kind, NotImplementedError):
        opening = {
            name: tensorstore.open(dict(spec), open=True, read=True) for name, spec in specs.items()
        }
        stores = {name: store.result() for name, store in opening.items()}
        # A forged header can state any shape, as unwritten chunks read as zeros: bound it.
        n_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        limit = _ALWAYS_FINE + _MOST_GROWTH * n_bytes
        for name, store in stores.items():
            item = store.dtype.numpy_dtype.itemsize
            chunk = [length or 1 for length in store.chunk_layout.read_chunk.shape or ()]
            n_chunks = math.prod(-(-n // c) for n, c in zip(store.shape, chunk, strict=True))
            largest = max(math.prod(store.shape), math.prod(chunk)) * item
            is_plausible = largest <= limit and n_chunks <= _MOST_CHUNKS
            require(is_plausible, f"the stated size of {name:.100} is impossible")
        return {
            name: _lazy(name, store, folder, kind, old_bfloat16) for name, store in stores.items()
        }


def _lazy(name: str, store: Any, folder: Path, kind: str, old_bfloat16: bool) -> LazyArray:
    async def read() -> np.ndarray:
        with reading(f"{name} of {folder}", kind, NotImplementedError):
            return await store.read()

    if old_bfloat16:
        return LazyAwaitableArray.from_tensor_store_spec(store.spec(), read)
    return LazyAwaitableArray(store.shape, store.dtype.numpy_dtype, read)
