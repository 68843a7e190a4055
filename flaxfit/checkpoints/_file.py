"""CheckpointFile: the checkpoint of one step on disk, all of it verified when it is read."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict
from jax.sharding import PartitionSpec

from flaxfit.checkpoints import _orbax, _seal
from flaxfit.checkpoints._compare import check_fits
from flaxfit.checkpoints._digest import as_digest, digest, digest_or_source
from flaxfit.checkpoints._environment import changes, environment, versions
from flaxfit.checkpoints._partial import chosen, path_in_state
from flaxfit.checkpoints._record import FORMAT, as_plain_json, first_line, read_record
from flaxfit.checkpoints._seal import Damaged
from flaxfit.checkpoints._tree import (
    Description,
    as_plain_state,
    describe,
    is_key,
    key_description,
    leaves_of,
    nested,
    on_device,
    sharding_of,
    unflatten,
)
from flaxfit.data._position import joined_position, own_position
from flaxfit.display import say
from flaxfit.distributed._processes import from_main
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.state._train_state import TrainState
from flaxfit.tree._types import ArrayLike, Json, PyTree

_CALLBACKS = "callbacks"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointFile:
    """What the folder of one step holds, as `CheckpointFileReader.read` gives it.

    >>> CheckpointFile(step=3, state=None, metrics={"loss": 0.5}, path=Path("run/3")).metrics
    {'loss': 0.5}
    """

    step: int
    """How many updates were done since the very first."""
    state: TrainState
    """The training state after that step."""
    metrics: Mapping[str, float]
    """The metrics of the checkpoint."""
    history: Json = None
    """The metrics of the run up to the step, where the writer was given them; JSON."""
    data_state: Json = None
    """The position of the data stream; JSON."""
    running: Json = None
    """What else the loop needs to go on exactly, such as counts between two checkpoints; JSON."""
    callback_states: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    """What callbacks remember, by their names; JSON."""
    callback_arrays: Mapping[str, PyTree] = dataclasses.field(default_factory=dict)
    """Arrays that callbacks keep, by their names: fields of a state, such as the best `params`."""
    stop: bool = False
    """Whether a callback has ended the run with this checkpoint."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The packages that wrote the file."""
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The machine and the settings that wrote it, as far as bits may depend on them."""
    path: Path
    """The folder that it was read from."""


def contents(
    checkpoint: Checkpoint,
    history: Json,
    callback_states: Any,
    monitor: Any,
    callback_arrays: Mapping[str, PyTree] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays that are to be written for a checkpoint, and the record beside them.

    A digest that can wait is represented by its array: `with_digests` completes the record.
    """
    arrays: dict[str, PyTree] = {}
    described: dict[str, dict[str, Json]] = {}
    names = checkpoint.state.axes or {}
    own = leaves_of(checkpoint.state)
    kept = leaves_of({_CALLBACKS: callback_arrays or {}})
    for path, leaf in (own | kept).items():
        if path in kept and leaf is own.get(_own_path(path)):
            described[path] = {**described[_own_path(path)], "is_own": True}
            continue  # What was just found to be the best is written once.
        description = describe(leaf)
        if path in names:
            description["axes"] = list(names[path])
        if is_key(leaf):
            description |= key_description(leaf)
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, np.ndarray):
            leaf = leaf.copy().view(_orbax.OwnCopy)  # It may be changed any time.
        described[path] = {**description, "digest": digest_or_source(leaf)}
        if leaf.size:  # Orbax writes no empty arrays, and the description says it all.
            arrays[path] = leaf
    record = {
        "format": FORMAT,
        "step": int(checkpoint.step),
        "metrics": {name: float(value) for name, value in checkpoint.metrics.items()},
        "history": history,
        "data_state": joined_position(as_plain_json(checkpoint.data_state)),
        "running": checkpoint.running,
        "callback_states": callback_states or {},
        "stop": bool(checkpoint.stop),
        "versions": versions(),
        "environment": environment(),
        "monitor": monitor,
    }
    return arrays, {**as_plain_json(record), "arrays": described}


def is_kept(record: Mapping[str, Json]) -> bool:
    """Whether the memory of all arrays stays as it is for as long as the record is there.

    So it is in the memory of the CPU, which what stands in the place of the digests is a view of:
    donating such an array copies it.
    """
    digests = (each["digest"] for each in record["arrays"].values())
    return jax.process_count() == 1 and not any(isinstance(each, str) for each in digests)


def kept(arrays: Mapping[str, PyTree], record: Mapping[str, Json]) -> dict[str, Any]:
    """The arrays, and in the place of those that were deleted since the views of their memory."""
    return {
        path: record["arrays"][path]["digest"] if _is_deleted(array) else array
        for path, array in arrays.items()
    }


def _is_deleted(array: ArrayLike) -> bool:
    return isinstance(array, jax.Array) and array.is_deleted()


def with_digests(record: Mapping[str, Json]) -> dict[str, Any]:
    """The record with all digests computed, as plain JSON."""
    described = {
        path: {**each, "digest": as_digest(each["digest"])}
        for path, each in record["arrays"].items()
    }
    return as_plain_json({**record, "arrays": described})


def read(
    path: Path, template: PyTree = None, partial: str | Sequence[str] | None = None
) -> CheckpointFile:
    """Reads and verifies the checkpoint of one step.

    Args:
      path: the folder of the step.
      template: a state that says what is expected and where it goes; its leaves may be
        `jax.ShapeDtypeStruct`s. Fields that it lacks (those of an `InferenceState`) are not read.
      partial: patterns of the weights to read; the template's leaves are kept for the rest.

    Raises:
      Damaged: some file is not what was written.
      ValueError: the file and the template differ.
    """
    record = read_record(path)
    described = record["arrays"]
    templates = {}
    if template is not None:
        fields = {field.name for field in dataclasses.fields(template)}
        templates = leaves_of(template)
        kept = _kept_by_callbacks(described) if isinstance(template, TrainState) else {}
        described = {name: d for name, d in described.items() if name.split("/")[0] in fields}
        if partial is None:
            # What callbacks keep goes where the state's own of that name goes.
            described |= {name: d for name, d in kept.items() if _own_path(name) in templates}
            templates |= {name: templates[_own_path(name)] for name in kept if name in described}
            check_fits(described, {name: describe(leaf) for name, leaf in templates.items()}, path)
        else:
            taken = chosen(described, templates, partial, path, path_in_state)
            described = {name: described[name] for name in taken}
    if problem := from_main("the seal of a checkpoint", lambda: _seal.problem(path)):
        raise Damaged(problem)
    stored = {name: each for name, each in described.items() if not each.get("is_own")}
    arrays = _read_arrays(path, stored, templates)
    for name in described.keys() - stored.keys():
        if _own_path(name) not in arrays:
            raise Damaged(f"it does not hold {name}")
        arrays[name] = arrays[_own_path(name)].copy()
    if partial is None and (changed := changes(record)):
        say(
            f"from {path} the numbers may not go on bit for bit; since it was saved, this has "
            f"changed: {', '.join(changed)}"
        )
    return CheckpointFile(
        step=record["step"],
        state=_plain_state(arrays, described) if template is None else unflatten(arrays, template),
        metrics=record["metrics"],
        history=record["history"],
        data_state=own_position(record["data_state"]),
        running=record.get("running"),
        callback_states=record["callback_states"],
        callback_arrays=_callback_arrays(arrays, template),
        # Old files tell among the states.
        stop=record.get("stop", record["callback_states"].get("stopped", False)),
        versions=record["versions"],
        environment=record["environment"],
        path=path,
    )


def _plain_state(arrays: Mapping[str, PyTree], described: Mapping[str, Description]) -> TrainState:
    """The state without a template, with the logical axes that the file names."""
    for name in ("step", "key"):  # What every state has; the rest may be without arrays.
        if name not in arrays:
            raise Damaged(f"it does not hold {name}")
    axes = {
        path: PartitionSpec(*(tuple(n) if isinstance(n, list) else n for n in description["axes"]))
        for path, description in described.items()
        if "axes" in description
    }
    return as_plain_state(arrays).replace(axes=FrozenDict(axes) or None)


def _kept_by_callbacks(described: Mapping[str, Json]) -> dict[str, Any]:
    return {name: each for name, each in described.items() if name.startswith(f"{_CALLBACKS}/")}


def _own_path(name: str) -> str:
    """The path in a state of an array that a callback keeps: "callbacks/<name>/<path>"."""
    return name.split("/", 2)[2]


def _callback_arrays(arrays: Mapping[str, PyTree], template: PyTree) -> dict[str, PyTree]:
    """Fields of a state by the names of the callbacks that keep them."""
    found: dict[str, dict[str, Any]] = {}
    for name, array in _kept_by_callbacks(arrays).items():
        found.setdefault(name.split("/")[1], {})[_own_path(name)] = array
    return {
        callback: nested(own)
        if template is None
        else {
            field: getattr(unflatten(own, template), field)
            for field in {path.split("/")[0] for path in own}
        }
        for callback, own in found.items()
    }


def _read_arrays(
    path: Path, described: Mapping[str, Description], templates: Mapping[str, Any]
) -> dict[str, Any]:
    wanted = {
        name: _stored(description, templates.get(name)) for name, description in described.items()
    }
    try:
        found = _orbax.read_arrays(path, {n: w for n, w in wanted.items() if math.prod(w.shape)})
    except (Damaged, MemoryError, PermissionError, jax.errors.JaxRuntimeError):
        raise  # It is said already, or no fault of the file.
    except Exception as error:
        raise Damaged(f"its arrays cannot be read ({first_line(error)})") from error
    arrays = {}
    for name, description in described.items():
        array = found[name] if name in found else np.zeros(wanted[name].shape, wanted[name].dtype)
        if not isinstance(array, np.ndarray | jax.Array):  # Orbax gives back what was asked for.
            raise Damaged(f"it does not hold {name}")
        is_whole = array.shape == wanted[name].shape and array.dtype == wanted[name].dtype
        if not is_whole or digest(array) != description["digest"]:
            raise Damaged(f"the content of {name} was changed")
        if "random_bits" in description:
            array = jax.random.wrap_key_data(jnp.asarray(array), impl=description["random_bits"])
        arrays[name] = array if templates else on_device(array)
    return arrays


def _stored(description: Description, template: PyTree) -> jax.ShapeDtypeStruct:
    """The array that is on disk for a leaf, and where it is to be read to."""
    if "random_bits" in description:
        return jax.ShapeDtypeStruct(tuple(description["words"]), np.uint32)
    shape, dtype = tuple(description["shape"]), jnp.dtype(description["dtype"])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_of(template))
