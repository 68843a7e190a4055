"""What the callbacks of a loop remember: collected for a checkpoint, put back from one."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from flaxfit.tree._functions import owner_of
from flaxfit.tree._types import Json, PyTree

_OLD_NAME = re.compile(r"(\d+)-(\w+)")


def collect(callbacks: Iterable[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What callbacks remember, by their names: as JSON, and in arrays.

    The arrays are fields of a training state by name, such as `{"params": ...}`.
    """
    found = _named(callbacks)
    states = {name: each.get_state() for name, each in found.items()}
    arrays = {
        name: each.get_arrays() for name, each in found.items() if hasattr(each, "get_arrays")
    }
    return states, {name: fields for name, fields in arrays.items() if fields}


def put_back(
    callbacks: Iterable[Any], states: Mapping[str, Json], arrays: Mapping[str, PyTree]
) -> list[str]:
    """Gives callbacks what `collect` has collected; tells what finds none, or is missing."""
    found, states = _named(callbacks), _as_named_now(states)
    for name, each in found.items():
        if name in states:
            each.set_state(states[name])
        if name in arrays and hasattr(each, "set_arrays"):
            each.set_arrays(arrays[name])
    return [
        *(f"no callback takes what {name} remembered" for name in states if name not in found),
        *(f"{name} begins afresh, as it was not there" for name in found if name not in states),
    ]


def _named(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Those that remember something, by type and occurrence: "Timer", "Timer-2".

    The place among the others is no part of the name: one that is added changes none.
    """
    found: dict[str, list[Any]] = defaultdict(list)
    for owner in map(owner_of, callbacks):
        same = found[type(owner).__name__]
        remembers = hasattr(owner, "get_state") and hasattr(owner, "set_state")
        if remembers and not any(owner is each for each in same):
            same.append(owner)
    return {
        _name(kind, i): each for kind, same in found.items() for i, each in enumerate(same, start=1)
    }


def _name(kind: str, i: int) -> str:
    return kind if i == 1 else f"{kind}-{i}"


def _as_named_now(states: Mapping[str, Json]) -> dict[str, Any]:
    """The states, where old files name them by their place ("3-Timer") as they are named now."""
    old = [(m, name) for name in states if (m := _OLD_NAME.fullmatch(name)) is not None]
    renamed = {name: state for name, state in states.items() if not _OLD_NAME.fullmatch(name)}
    renamed.pop("stopped", None)  # In old files; no callback.
    counts: dict[str, int] = defaultdict(int)
    for match, name in sorted(old, key=lambda each: int(each[0][1])):
        counts[match[2]] += 1
        renamed[_name(match[2], counts[match[2]])] = states[name]
    return renamed
