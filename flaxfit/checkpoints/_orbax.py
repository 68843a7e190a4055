"""The one module that talks to Orbax: writes and reads the arrays and the record of one step."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

ARRAYS = "arrays"
"""The item of a step that holds its arrays, by path, in one flat dict."""
RECORD = "record"
"""The item of a step that holds everything else, as JSON."""


class StepWriter:
    """Writes steps in the background, one at a time.

    The arrays appear under their name when they are complete, or never.
    """

    def __init__(self) -> None:
        import orbax.checkpoint as ocp

        self._orbax = ocp
        self._checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())

    def start(self, path: Path, arrays: Mapping[str, Any]) -> None:
        """Begins to write a step; the arrays may be changed or donated once this returns."""
        args = self._orbax.args
        items = {name: _savable(array) for name, array in arrays.items()}
        self._checkpointer.save(path, args=args.Composite(**{ARRAYS: args.PyTreeSave(items)}))

    def wait(self) -> None:
        """Waits until the step is on disk; raises what went wrong."""
        self._checkpointer.wait_until_finished()

    def close(self) -> None:
        """Ends the background threads."""
        self._checkpointer.close()


def write_record(path: Path, record: Any) -> None:
    """Writes the record of a step, in the place where Orbax would put a JSON item."""
    (path / RECORD).mkdir()
    (path / RECORD / "metadata").write_text(json.dumps(record), encoding="utf-8")


def read_record(path: Path) -> Any:
    """The record of a step: whatever JSON value the file holds."""
    return json.loads((path / RECORD / "metadata").read_text(encoding="utf-8"))


def read_arrays(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """The wanted arrays of a step: sharded where a sharding is named, else in NumPy."""
    import orbax.checkpoint as ocp

    if not wanted:
        return {}
    args = {
        name: ocp.RestoreArgs(restore_type=np.ndarray)
        if array.sharding is None
        else ocp.ArrayRestoreArgs(sharding=array.sharding)
        for name, array in wanted.items()
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restore = ocp.args.PyTreeRestore(dict(wanted), restore_args=args, partial_restore=True)
        return checkpointer.restore(path / ARRAYS, args=restore)


def _savable(array: Any) -> Any:
    """The form in which Orbax takes an array."""
    if not isinstance(array, jax.Array) or not array.is_fully_addressable:
        return array
    if jax.process_count() > 1:
        # Orbax writes host-local arrays only from NumPy, and then on the first process alone.
        return np.asarray(array)
    # One copy of a replicated array: else Orbax cuts it into pieces, device by device.
    return array.addressable_data(0) if array.is_fully_replicated else array
