"""The states of a loop's callbacks: collected for a checkpoint, and restored from one."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import jax
import numpy as np

from flaxfit.state._train_state import TrainState
from flaxfit.tree import Function, Json, PyTree, owner_of

_FIELDS = frozenset(field.name for field in dataclasses.fields(TrainState))
_SHOWS_ONLY = re.compile(r"ProgressBar(-\d+)?")
"""Names of callbacks whose state does not affect a run."""


def collect(callbacks: Iterable[Function]) -> tuple[dict[str, Json], dict[str, PyTree]]:
    """Collects the states of callbacks by name: their JSON, and their arrays.

    The arrays are the entries of `get_state()` that are named like a field of a training state,
    such as "params".
    """
    states, arrays = {}, {}
    for name, each in _named(callbacks).items():
        states[name] = state = each.get_state()
        if isinstance(state, Mapping):
            fields = {key: state[key] for key in _FIELDS & state.keys() if _is_field(state[key])}
            states[name] = {key: value for key, value in state.items() if key not in fields}
            if fields:
                arrays[name] = fields
    return states, arrays


def put_back(
    callbacks: Iterable[Function], states: Mapping[str, Json], arrays: Mapping[str, PyTree]
) -> list[str]:
    """Restores what `collect` returned; lists states without a callback, and the reverse.

    Displays are not listed: they may be added or removed.
    """
    found = _named(callbacks)
    for name, each in found.items():
        if name in states:
            kept = arrays.get(name)
            each.set_state({**states[name], **kept} if kept else states[name])
    unused = (name for name in states if _is_missed(name, found))
    fresh = (name for name in found if _is_missed(name, states))
    return [
        *(f"no callback takes the saved state of {name}" for name in unused),
        *(f"{name} starts from scratch: the checkpoint holds no state of it" for name in fresh),
    ]


def _is_missed(name: str, known: Mapping[str, PyTree]) -> bool:
    return name not in known and not _SHOWS_ONLY.fullmatch(name)


def _is_field(value: PyTree) -> bool:
    """Returns whether a value holds arrays, or is an empty container that JSON cannot hold."""
    leaves = jax.tree.leaves(value)
    is_json = value is None or type(value) in (dict, list)
    return any(isinstance(x, jax.Array | np.ndarray) for x in leaves) or not (leaves or is_json)


def _named(callbacks: Iterable[Function]) -> dict[str, PyTree]:
    """Names the callbacks with a state by type and occurrence: "Timer", "Timer-2".

    The position in the list is not part of the name, so that adding a callback changes none.
    """
    found: dict[str, list[PyTree]] = defaultdict(list)
    for owner in map(owner_of, callbacks):
        same = found[type(owner).__name__]
        remembers = hasattr(owner, "get_state") and hasattr(owner, "set_state")
        if remembers and not any(owner is each for each in same):
            same.append(owner)
    return {
        kind if i == 1 else f"{kind}-{i}": each
        for kind, same in found.items()
        for i, each in enumerate(same, start=1)
    }
