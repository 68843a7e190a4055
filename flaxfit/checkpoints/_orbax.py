"""Writes and reads the arrays and the record of one step; the only module that uses Orbax."""

import asyncio
import itertools
import json
import logging
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxfit.checkpoints._seal import Damaged
from flaxfit.tree import Array, Json

ARRAYS = "arrays"
"""A step's subfolder of arrays, a flat dict by path."""
RECORD = "record"
"""A step's subfolder of everything else, as JSON."""


class StepWriter:
    """Writes the arrays of steps in the background, one step at a time.

    It uses Orbax's handler directly: `AsyncCheckpointer` adds a second temporary folder, and
    threads that the caller must wait for. `_folder.complete` commits a step.
    """

    def __init__(self) -> None:
        import orbax.checkpoint as ocp

        self._save_args = ocp.args.PyTreeSave
        # Weights hardly compress.
        self._handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        self._commits: Sequence[Any] = ()
        logging.getLogger("absl").addFilter(_is_not_raised)

    def start(self, path: Path, arrays: Mapping[str, Array]) -> None:
        """Starts to write results of `savable`; they may be donated afterwards."""
        from etils import epath

        # Orbax requires this type of path here.
        folder = epath.Path(path / ARRAYS)
        save = self._handler.async_save(folder, args=self._save_args(dict(arrays)))
        self._commits = _run(save) or ()

    def wait(self) -> None:
        """Waits until the writes of this process are on disk; raises the first failure."""
        commits, self._commits = self._commits, ()
        failures = []
        for commit in commits:  # Wait for all: after a failure the caller may remove the folder.
            try:
                commit.result()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def finish(self, path: Path, arrays: Mapping[str, Array]) -> None:
        """Merges the files of all processes; called by one process after all have finished.

        Raises:
          OSError: the merged files do not hold all of the arrays.
        """
        # A pathlib path: etils treats "[" in a folder's name as a pattern, and then Orbax finds
        # nothing to merge and only warns.
        folder: Any = path / ARRAYS
        self._handler.finalize(folder)
        try:
            _check_layout(folder, arrays)
        except Damaged as error:
            raise OSError(f"the files are incomplete after writing: {error}") from error

    def close(self) -> None:
        """Stops the background threads."""
        self._handler.close()


def _is_not_raised(record: logging.LogRecord) -> bool:
    """Filters out the log of a failure that `StepWriter.wait` raises anyway."""
    return not (record.exc_info and "_SignalingThread" in str(record.msg))


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine, in a new thread if an event loop is running (as in notebooks)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, coroutine).result()


def write_record(path: Path, record: Json) -> None:
    """Writes the record of a step."""
    (path / RECORD).mkdir()
    (path / RECORD / "metadata").write_text(json.dumps(record), encoding="utf-8")


def read_record(path: Path) -> Json:
    """Reads the record of a step: any JSON value."""
    return json.loads((path / RECORD / "metadata").read_text(encoding="utf-8"))


def read_arrays(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, object]:
    """Reads arrays of a step: sharded if a sharding is given, else as NumPy arrays."""
    import orbax.checkpoint as ocp

    if not wanted:
        return {}
    _check_layout(path / ARRAYS, wanted)
    args = {
        name: ocp.RestoreArgs(restore_type=np.ndarray)
        if array.sharding is None
        else ocp.ArrayRestoreArgs(sharding=array.sharding)
        for name, array in wanted.items()
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restore = ocp.args.PyTreeRestore(dict(wanted), restore_args=args, partial_restore=True)
        return checkpointer.restore(path / ARRAYS, args=restore)


def _check_layout(path: Path, wanted: Mapping[str, Array | jax.ShapeDtypeStruct]) -> None:
    """Checks that all chunks of the arrays exist, with the expected headers.

    Orbax allocates the size that a header states, and reads a missing chunk as zeros.
    """
    import tensorstore

    layout = json.loads((path / "_METADATA").read_text(encoding="utf-8"))
    if layout.get("use_ocdbt") is not True or layout.get("use_zarr3") is not False:
        raise Damaged("its arrays are not in the format that this library writes")
    base = {"driver": "file", "path": f"{path}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    keys = set(store.list().result())
    headers = {name: store.read(f"{name.rstrip('/')}/.zarray") for name in wanted}
    for name, array in wanted.items():
        shape = list(array.shape)
        # 2: registered by `ml_dtypes`. It is 0 for copies of NumPy's own, as in unpickled arrays.
        dtype = array.dtype.name if array.dtype.isbuiltin == 2 else array.dtype.str
        expected = {"shape": shape, "dtype": dtype}
        header = json.loads(headers[name].result().value or "null")
        match header:
            case {"chunks": [*chunks], "compressor": None, "filters": None} if (
                expected == {key: header.get(key) for key in expected}
                and len(chunks) == len(shape)
                and all(type(n) is int and 0 < n <= m for n, m in zip(chunks, shape, strict=True))
                and all(
                    f"{name.rstrip('/')}/{key}".encode() in keys for key in _keys(shape, chunks)
                )
            ):
                continue
        raise Damaged(f"it has no array {name} of {array.dtype} {array.shape}, as its record says")


def _keys(shape: Sequence[int], chunks: Sequence[int]) -> Iterator[str]:
    """Yields the keys of the chunks of an array in the zarr format."""
    counts = (range(-(-m // n)) for m, n in zip(shape, chunks, strict=True))
    return (".".join(map(str, place)) or "0" for place in itertools.product(*counts))


class OwnCopy(np.ndarray):
    """A NumPy copy that nothing else refers to: makes Orbax's deep copy a no-op."""

    def __deepcopy__(self, memo: object) -> "OwnCopy":
        return self


def savable(array: Array) -> Array:
    """Converts an array to the form that Orbax writes."""
    if not isinstance(array, jax.Array) or not array.is_fully_addressable:
        return array
    if jax.process_count() > 1:
        # Orbax writes host-local arrays only if they are NumPy, and only on the first process.
        return np.asarray(array)
    # One replica only: Orbax would split a replicated array into one piece per device.
    return array.addressable_data(0) if array.is_fully_replicated else array
