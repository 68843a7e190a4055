"""The contents of a checkpoint file: arrays by path, and a record of everything else."""

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from flaxfit.checkpoints import _orbax
from flaxfit.checkpoints._environment import environment, versions
from flaxfit.checkpoints._record import FORMAT, Record, as_plain_json, read_record
from flaxfit.checkpoints._seal import Damaged
from flaxfit.checkpoints._tree import describe, key_description, leaves_of
from flaxfit.data._position import joined_position
from flaxfit.state import Checkpoint
from flaxfit.tree import Array, Json, PyTree, as_digests, digests_or_sources, is_key

CALLBACKS, COMPANIONS = "callbacks", "companions"
"""Path prefixes of arrays outside the state."""


def contents(
    checkpoint: Checkpoint,
    history: Json,
    callback_states: Mapping[str, Json],
    callback_arrays: Mapping[str, PyTree],
    monitor: Mapping[str, str] | None,
) -> tuple[dict[str, Array], Record]:
    """Returns the arrays to write for a checkpoint, and its record.

    In the record, host memory stands for the digests that `with_digests` computes later.
    """
    arrays: dict[str, Array] = {}
    described: dict[str, dict[str, Json]] = {}
    names = checkpoint.state.axes or {}
    own = leaves_of(checkpoint.state)
    of_callbacks = leaves_of({CALLBACKS: callback_arrays})
    companions = leaves_of({COMPANIONS: checkpoint.companions or {}})
    # An array that is also the state's, such as the best weights right now, is written once.
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
            leaf = leaf.copy().view(_orbax.OwnCopy)  # The caller may change it after the call.
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
    """Returns whether a record keeps all memory alive, even of donated or deleted arrays.

    On the CPU it holds NumPy views; JAX does not reuse memory that has views.
    """
    digests = (each["digest"] for each in record["arrays"].values())
    return jax.process_count() == 1 and not any(isinstance(each, str) for each in digests)


def undeleted(arrays: Mapping[str, Array], record: Record) -> dict[str, Array]:
    """Replaces deleted arrays by the record's views of their memory."""
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
    """Returns whether a step on disk has the same record, and so, by digest, the same arrays."""
    try:
        return path.exists() and read_record(path) == with_digests(record)
    except Damaged:
        return False


def own_path(name: str) -> str:
    """Returns <path> of "callbacks/<name>/<path>", the path of a state's array."""
    return name.split("/", 2)[2]
