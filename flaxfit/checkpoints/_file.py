"""CheckpointFile: the checkpoint of one step, read from disk and verified."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict
from jax.sharding import PartitionSpec

from flaxfit.checkpoints import _orbax, _seal
from flaxfit.checkpoints._compare import check_fits, choose, path_in_state
from flaxfit.checkpoints._contents import CALLBACKS, COMPANIONS, own_path
from flaxfit.checkpoints._environment import changes
from flaxfit.checkpoints._record import read_record
from flaxfit.checkpoints._seal import Damaged
from flaxfit.checkpoints._tree import (
    Description,
    describe,
    leaves_of,
    nested,
    on_device,
    unflatten,
)
from flaxfit.data._position import own_position
from flaxfit.display import first_line, say
from flaxfit.distributed import from_main
from flaxfit.state import InferenceState, TemplateOf, TrainState
from flaxfit.tree import Array, ArrayLike, Json, PyTree, digests, sharding_of

Value = TypeVar("Value")
Template = TrainState | InferenceState | TemplateOf | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointFile:
    """Holds the content of a checkpoint on disk, as `CheckpointFileReader.read` returns it.

    >>> CheckpointFile(step=3, state=None, metrics={"loss": 0.5}, path=Path("run/3")).metrics
    {'loss': 0.5}

    Args:
      step: the number of updates since the start of training.
      state: the training state after that step.
      metrics: the metrics of the checkpoint.
      history: the metrics of the run up to the step, if the writer was given them; JSON.
      data_state: the position of the data stream; JSON.
      running: the size of the batches, the number of virtual replicas, and the paths of frozen
        parameters; JSON.
      n_completed_steps: the number of updates since the previous checkpoint.
      n_examples: the number of examples trained on since the previous checkpoint.
      sums: the sums of the metrics so far, for a checkpoint between two that the loop yields.
      callback_states: the states of callbacks by their names; JSON.
      callback_arrays: arrays in the states of callbacks, by their names: fields such as the best
        `params`.
      companions: the variables of companions by name, as nested dicts; empty if none were saved.
      stop: whether a callback ended the run with this checkpoint.
      versions: the packages that wrote the file.
      environment: the facts about the machine and its settings on which bits may depend.
      path: the folder of the step.
    """

    step: int
    state: TrainState
    metrics: Mapping[str, float]
    history: Json = None
    data_state: Json = None
    running: Json = None
    n_completed_steps: int = 0
    n_examples: int = 0
    sums: Mapping[str, np.ndarray] | None = None
    callback_states: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    callback_arrays: Mapping[str, PyTree] = dataclasses.field(default_factory=dict)
    companions: Mapping[str, PyTree] = dataclasses.field(default_factory=dict)
    stop: bool = False
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    path: Path


def read(
    path: Path,
    template: Template = None,
    partial: str | Sequence[str] | None = None,
) -> CheckpointFile:
    """Reads and verifies the checkpoint of one step; see `CheckpointFileReader.read`."""
    record = read_record(path)
    if isinstance(template, TemplateOf):
        template = template.make(record["running"])
    described, templates = record["arrays"], {}
    if template is not None:
        frozen = (record["running"] or {}).get("frozen")
        described, templates = _wanted(described, template, partial, path, frozen)
    if problem := from_main("the seal of a checkpoint", lambda: _seal.problem(path)):
        raise Damaged(problem)
    stored = {name: each for name, each in described.items() if not each.get("is_own")}
    arrays = _read_arrays(path, stored, templates)
    for name in described.keys() - stored.keys():
        if own_path(name) not in arrays:
            raise Damaged(f"it does not hold {name}")
        arrays[name] = arrays[own_path(name)].copy()
    if partial is None and (changed := changes(record)):
        say(
            f"a run resumed from {path} may not continue bit for bit; since it was saved, this has "
            f"changed: {', '.join(changed)}"
        )
    sums = record["sums"]
    metrics: dict[str, PyTree] = {
        name: np.asarray(value) if isinstance(value, list) else value
        for name, value in record["metrics"].items()
    }
    return CheckpointFile(
        step=record["step"],
        state=_plain_state(arrays, described) if template is None else unflatten(arrays, template),
        metrics=metrics,
        history=record["history"],
        data_state=own_position(record["data_state"]),
        running=record["running"],
        n_completed_steps=record["n_completed_steps"],
        n_examples=record["n_examples"],
        sums=sums and {dtype: np.asarray(pair, dtype) for dtype, pair in sums.items()},
        callback_states=record["callback_states"],
        callback_arrays=_callback_arrays(arrays, template),
        companions=nested(_below(COMPANIONS, arrays)).get(COMPANIONS, {}),
        stop=record["stop"],
        versions=record["versions"],
        environment=record["environment"],
        path=path,
    )


def _wanted(
    described: Mapping[str, Description],
    template: TrainState | InferenceState,
    partial: str | Sequence[str] | None,
    path: Path,
    frozen: Sequence[str] | None,
) -> tuple[dict[str, Description], dict[str, ArrayLike]]:
    """Returns the descriptions of the arrays to read, and the leaves that they replace."""
    fields = {field.name for field in dataclasses.fields(template)}
    templates = leaves_of(template)
    found = {name: d for name, d in described.items() if name.split("/")[0] in fields}
    if partial is not None:
        taken = choose(found, templates, partial, path, path_in_state)
        return {name: found[name] for name in taken}, templates
    here = {name: describe(leaf) for name, leaf in templates.items()}
    if isinstance(template, TrainState):
        # A callback's array gets the sharding of the state's array with that path, but keeps its
        # dtype, such as float32 for a mean of bfloat16 weights.
        own = {name: own_path(name) for name in _below(CALLBACKS, described)}
        own = {name: path for name, path in own.items() if path in templates}
        found |= {name: described[name] for name in own}
        templates |= {name: templates[path] for name, path in own.items()}
        here |= {n: {**here[path], "dtype": found[n]["dtype"]} for n, path in own.items()}
    check_fits(found, here, path, frozen=frozen)
    if isinstance(template, TrainState):
        found |= _below(COMPANIONS, described)  # The loop compares them with its task's.
    return found, templates


def _plain_state(arrays: Mapping[str, Array], described: Mapping[str, Description]) -> TrainState:
    """Makes a state of nested dicts, with the logical axes from the file."""
    for name in ("step", "key"):  # Every state has these; other fields may lack arrays.
        if name not in arrays:
            raise Damaged(f"it does not hold {name}")
    axes = {
        path: PartitionSpec(*(tuple(n) if isinstance(n, list) else n for n in description["axes"]))
        for path, description in described.items()
        if "axes" in description
    }
    fields = {"params": {}, "opt_state": {}, "model_state": {}, **nested(arrays)}
    known = {field.name for field in dataclasses.fields(TrainState)}
    state = TrainState(**{name: value for name, value in fields.items() if name in known})
    return state.replace(axes=FrozenDict(axes) or None)


def _below(place: str, named: Mapping[str, Value]) -> dict[str, Value]:
    return {name: each for name, each in named.items() if name.startswith(f"{place}/")}


def _callback_arrays(
    arrays: Mapping[str, Array], template: TrainState | InferenceState | None
) -> dict[str, PyTree]:
    """Returns the arrays of callbacks, as fields of a state, by callback name."""
    found: dict[str, dict[str, Array]] = {}
    for name, array in _below(CALLBACKS, arrays).items():
        found.setdefault(name.split("/")[1], {})[own_path(name)] = array
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
    path: Path, described: Mapping[str, Description], templates: Mapping[str, ArrayLike]
) -> dict[str, Array]:
    """Reads arrays and compares them with their descriptions and digests."""
    wanted = {
        name: _stored(description, templates.get(name)) for name, description in described.items()
    }
    try:
        found = _orbax.read_arrays(path, {n: w for n, w in wanted.items() if math.prod(w.shape)})
    except (Damaged, MemoryError, jax.errors.JaxRuntimeError):
        raise  # Clear already, or not the file's fault.
    except Exception as error:
        _seal.raise_if_unread(error, path)
        raise Damaged(f"its arrays cannot be read ({first_line(error)})") from error
    arrays: dict[str, Array] = {}
    for name, each in wanted.items():
        array = found[name] if name in found else np.zeros(each.shape, each.dtype)
        if not isinstance(array, np.ndarray | jax.Array):  # Orbax returns its argument if missing.
            raise Damaged(f"it does not hold {name}")
        if (array.shape, array.dtype) != (each.shape, each.dtype):
            raise Damaged(f"the content of {name} was changed")
        arrays[name] = array
    computed = digests(arrays)
    for name, description in described.items():
        if computed[name] != description["digest"]:
            raise Damaged(f"the content of {name} was changed")
        array = arrays[name]
        if "random_bits" in description:
            array = jax.random.wrap_key_data(jnp.asarray(array), impl=description["random_bits"])
        arrays[name] = array if templates else on_device(array)
    return arrays


def _stored(description: Description, template: ArrayLike | None) -> jax.ShapeDtypeStruct:
    """Describes a leaf's array on disk, and the sharding to read it with."""
    if "random_bits" in description:
        return jax.ShapeDtypeStruct(tuple(description["words"]), np.uint32)
    shape, dtype = tuple(description["shape"]), jnp.dtype(description["dtype"])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_of(template))
