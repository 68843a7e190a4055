"""The contents of a checkpoint file: arrays by path, and the record of all the rest."""

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from flaxfit.checkpoints import _orbax
from flaxfit.checkpoints._environment import environment, versions
from flaxfit.checkpoints._record import FORMAT, Record, as_plain_json, read_record
from flaxfit.checkpoints._seal import Damaged
from flaxfit.checkpoints._tree import describe, is_key, key_description, leaves_of
from flaxfit.data._position import joined_position
from flaxfit.state import Checkpoint
from flaxfit.tree import Array, Json, PyTree, as_digests, digests_or_sources

CALLBACKS, COMPANIONS = "callbacks", "companions"
"""The first parts of the paths of arrays outside of the state."""


def contents(
    checkpoint: Checkpoint,
    history: Json,
    callback_states: Mapping[str, Json],
    callback_arrays: Mapping[str, PyTree],
    monitor: Mapping[str, str] | None,
) -> tuple[dict[str, Array], Record]:
    """Returns the arrays to write for a checkpoint, and its record.

    The record holds memory in the place of digests to compute later, by `with_digests`.
    """
    arrays: dict[str, Array] = {}
    described: dict[str, dict[str, Json]] = {}
    names = checkpoint.state.axes or {}
    own = leaves_of(checkpoint.state)
    of_callbacks = leaves_of({CALLBACKS: callback_arrays})
    companions = leaves_of({COMPANIONS: checkpoint.companions or {}})
    # The state's own arrays, such as the best so far, are written once.
    shared = {path for path, leaf in of_callbacks.items() if leaf is own.get(own_path(path))}
    for path, leaf in (own | of_callbacks | companions).items():
        if path in shared:
            continue
        description = describe(leaf)
        if path in names:
            description["axes"] = list(names[path])
        if is_key(leaf):
            description |= key_description(leaf)
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, np.ndarray):
            leaf = leaf.copy().view(_orbax.OwnCopy)  # The caller may change it at any time.
        described[path] = description
        arrays[path] = leaf
    for path, source in digests_or_sources(arrays).items():
        described[path]["digest"] = source
        if not arrays[path].size:  # Orbax writes no empty arrays; the description is enough.
            del arrays[path]
    for path in shared:
        described[path] = {**described[own_path(path)], "is_own": True}
    record = {
        "format": FORMAT,
        "step": int(checkpoint.step),
        "metrics": {
            name: np.asarray(value).tolist() if np.ndim(value) else float(value)
            for name, value in checkpoint.metrics.items()
        },
        "history": history,
        "data_state": joined_position(as_plain_json(checkpoint.data_state)),
        "running": checkpoint.running,
        "n_completed_steps": checkpoint.n_completed_steps,
        "n_examples": checkpoint.n_examples,
        "sums": checkpoint.sums,
        "callback_states": callback_states,
        "stop": bool(checkpoint.stop),
        "versions": versions(),
        "environment": environment(),
        "monitor": monitor,
    }
    return arrays, {**as_plain_json(record), "arrays": described}


def holds_memory(record: Record) -> bool:
    """Whether a record keeps the memory of all arrays, even if they are donated or deleted.

    On the CPU it holds views of them in the place of digests, which JAX respects.
    """
    digests = (each["digest"] for each in record["arrays"].values())
    return jax.process_count() == 1 and not any(isinstance(each, str) for each in digests)


def undeleted(arrays: Mapping[str, Array], record: Record) -> dict[str, Array]:
    """Replaces arrays that were deleted by the views of their memory in the record."""
    return {
        path: record["arrays"][path]["digest"]
        if isinstance(array, jax.Array) and array.is_deleted()
        else array
        for path, array in arrays.items()
    }


def with_digests(record: Record) -> Record:
    """Returns the record with all digests computed, as plain JSON."""
    digests_of = as_digests({path: each["digest"] for path, each in record["arrays"].items()})
    described = {
        path: {**each, "digest": digests_of[path]} for path, each in record["arrays"].items()
    }
    return as_plain_json({**record, "arrays": described})


def holds(path: Path, record: Record) -> bool:
    """Whether a step on disk has the same record, and by its digests the same arrays."""
    try:
        return path.exists() and read_record(path) == with_digests(record)
    except Damaged:
        return False


def own_path(name: str) -> str:
    """Returns <path> of "callbacks/<name>/<path>", where the state has an array of its own."""
    return name.split("/", 2)[2]
