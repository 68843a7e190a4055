"""The one module that talks to Orbax: writes and reads the arrays and the record of one step."""

import asyncio
import json
import math
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxfit.checkpoints._ocdbt import MANIFEST, check_index
from flaxfit.checkpoints._seal import Damaged

ARRAYS = "arrays"
"""The folder of a step that holds its arrays, by path, in one flat dict."""
RECORD = "record"
"""The folder of a step that holds everything else, as JSON."""


class StepWriter:
    """Writes the arrays of steps in the background, one step at a time.

    It holds Orbax's handler alone. Its `AsyncCheckpointer` would add a second temporary folder and
    threads of its own, for which the caller waits; a step is made whole by `_folder.complete`.
    """

    def __init__(self) -> None:
        import orbax.checkpoint as ocp

        self._save_args = ocp.args.PyTreeSave
        # Uncompressed, as weights hardly shrink: so no file can claim more than it holds.
        self._handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        self._commits: Any = ()

    def start(self, path: Path, arrays: Mapping[str, Any]) -> None:
        """Begins to write into the folder of a step; once this returns, arrays may be donated.

        Args:
          path: the folder of the step.
          arrays: what to write, by name, as `savable` gives it.
        """
        save = self._handler.async_save(_arrays_folder(path), args=self._save_args(dict(arrays)))
        self._commits = _run(save) or ()

    def wait(self) -> None:
        """Waits until what this process writes is on disk; raises what went wrong first."""
        commits, self._commits = self._commits, ()
        failures = []
        for commit in commits:  # All of them: who hears of a failure may remove the folder.
            try:
                commit.result()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def finish(self, path: Path) -> None:
        """Joins what all processes have written; for one of them, when all are done.

        Raises:
          ValueError: whoever reads it would refuse its index. That must not be found out then.
        """
        self._handler.finalize(_arrays_folder(path))
        if (path / ARRAYS / MANIFEST).exists():
            check_index(path / ARRAYS)

    def close(self) -> None:
        """Ends the background threads."""
        self._handler.close()


def _arrays_folder(path: Path) -> Any:
    """Where a step holds its arrays, as the kind of path that Orbax asks for."""
    from etils import epath

    return epath.Path(path / ARRAYS)


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns, in a notebook as well, where a thread has its event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, coroutine).result()


def write_record(path: Path, record: Any) -> None:
    """Writes the record of a step."""
    (path / RECORD).mkdir()
    (path / RECORD / "metadata").write_text(json.dumps(record), encoding="utf-8")


def read_record(path: Path) -> Any:
    """The record of a step: whatever JSON value the file holds."""
    return json.loads((path / RECORD / "metadata").read_text(encoding="utf-8"))


def read_arrays(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """The wanted arrays of a step: sharded where a sharding is named, else in NumPy.

    Raises:
      Damaged: the files hold arrays of other sizes; no memory is taken for those.
    """
    import orbax.checkpoint as ocp

    if not wanted:
        return {}
    _check_sizes(path / ARRAYS, wanted)
    args = {
        name: ocp.RestoreArgs(restore_type=np.ndarray)
        if array.sharding is None
        else ocp.ArrayRestoreArgs(sharding=array.sharding)
        for name, array in wanted.items()
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restore = ocp.args.PyTreeRestore(dict(wanted), restore_args=args, partial_restore=True)
        return checkpointer.restore(path / ARRAYS, args=restore)


def _check_sizes(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Compares what the files say of the wanted arrays with these, before any array is read.

    Orbax believes them, and the process would be aborted for lack of memory.
    """
    import tensorstore

    layout = json.loads((path / "_METADATA").read_text(encoding="utf-8"))
    if layout.get("use_ocdbt") is not True or layout.get("use_zarr3") is not False:
        raise Damaged("its arrays are in another format than that of this library")
    try:
        n_inline = check_index(path)  # Small values lie among the names, which are compressed.
    except ValueError as error:
        raise Damaged(str(error)) from error
    base = {"driver": "file", "path": f"{path}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    needed = sum(math.prod(array.shape) * array.dtype.itemsize for array in wanted.values())
    most = n_inline + sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if needed > most:
        raise Damaged(f"its arrays take {needed:,} bytes, and its files hold {most:,} at most")
    headers = {name: store.read(f"{name.rstrip('/')}/.zarray") for name in wanted}
    for name, array in wanted.items():
        shape = list(array.shape)
        expected = {"shape": shape, "dtype": _zarr_name(array.dtype)}
        header = json.loads(headers[name].result().value or "null")
        match header:
            case {"chunks": [*chunks], "compressor": None, "filters": None} if (
                expected == {key: header.get(key) for key in expected}
                and len(chunks) == len(shape)
                and all(type(n) is int and 0 < n <= m for n, m in zip(chunks, shape, strict=True))
            ):
                continue
        raise Damaged(f"its arrays hold no {name} of {array.dtype} {array.shape}, as it claims")


def _zarr_name(dtype: np.dtype) -> str:
    """What the zarr format calls a dtype."""
    return dtype.str if dtype.isbuiltin == 1 else dtype.name


class OwnCopy(np.ndarray):
    """A copy in NumPy that nobody else holds: Orbax, which would copy it again, need not."""

    def __deepcopy__(self, memo: Any) -> "OwnCopy":
        return self


def savable(array: Any) -> Any:
    """The form in which Orbax takes an array."""
    if not isinstance(array, jax.Array) or not array.is_fully_addressable:
        return array
    if jax.process_count() > 1:
        # Orbax writes host-local arrays only from NumPy, and then on the first process alone.
        return np.asarray(array)
    # One copy of a replicated array: else Orbax cuts it into pieces, device by device.
    return array.addressable_data(0) if array.is_fully_replicated else array
