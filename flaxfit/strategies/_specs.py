"""Partition specs: map the dimensions of a state's arrays to axes of a mesh."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from jax.sharding import PartitionSpec

from flaxfit.state import specs_by_parameter
from flaxfit.tree import PyTree, Rules, flat

Axes: TypeAlias = str | tuple[str, ...] | None
"""The mesh axes that split a dimension."""

MeshAxes: TypeAlias = Axes | PartitionSpec
"""The right side of a rule."""

Names: TypeAlias = Sequence[str | None]
"""The names of the dimensions of an array."""

STANDARD_RULES: Rules = (
    ("vocab", "model"),
    ("mlp", "model"),
    ("heads", "model"),
    ("joined_kv", "model"),
    ("embed", None),
    ("kv", None),
)
"""Tensor parallelism by the usual names of a transformer's dimensions."""

SMALL = 4096
"""FSDP keeps arrays with fewer elements whole: gathering them costs more than it saves."""


def state_specs(
    state: PyTree, sizes: Mapping[str, int], rules: Rules, fsdp: str | None
) -> dict[str, PartitionSpec]:
    """Returns a spec by path for each array of the parameters, optimizer and model state.

    Rules are pairs `(logical name, axis)` or `(pattern of parameter paths, PartitionSpec)`. The
    axis `fsdp` splits the largest free dimension of every array that is not small.
    """
    names, arrays = state.axes or {}, flat(state)
    problems = list(_unknown_axes(names, arrays, sizes, rules))
    if problems:
        raise ValueError(_message(sizes, problems))
    specs = {}
    for path, array in arrays.items():
        if path.split("/")[0] == "opt_state":
            continue
        shape = np.shape(array)
        specs[path], wrong = _spec(path, shape, names.get(path, ()), sizes, rules)
        problems += [f"{path} {shape}: {problem}" for problem in wrong]
    if problems:
        raise ValueError(_message(sizes, problems))

    def spread(path: str, spec: PartitionSpec) -> PartitionSpec:
        shape = np.shape(arrays[path])
        return spec if fsdp is None else _spread(shape, spec, fsdp, sizes[fsdp])

    specs = {path: spread(path, spec) for path, spec in specs.items()}
    opt_state = {"opt_state": getattr(state, "opt_state", ())}
    for path, spec in specs_by_parameter(opt_state, {"params": state.params}, specs).items():
        # FSDP also splits arrays that are not like any parameter.
        specs[path] = spec if any(spec) else spread(path, spec)
    return specs


def axes_of(entry: MeshAxes) -> tuple[str, ...]:
    """Returns the axes of an entry of a spec or of the right side of a rule, as a tuple.

    >>> axes_of(None), axes_of("data"), axes_of(("data", "model"))
    ((), ('data',), ('data', 'model'))
    """
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def n_parts(spec: Iterable[Axes], sizes: Mapping[str, int]) -> int:
    """Returns the number of distinct parts of an array."""
    return math.prod(sizes[axis] for entry in spec for axis in axes_of(entry))


def _spec(
    path: str, shape: tuple[int, ...], names: Names, sizes: Mapping[str, int], rules: Rules
) -> tuple[PartitionSpec, list[str]]:
    """Returns the spec of an array, by its path or its dimension names, and problems with it."""
    place, _, name = path.partition("/")
    patterns = [(key, value) for key, value in rules if isinstance(value, PartitionSpec)]
    entries = next((v for key, v in patterns if re.fullmatch(key, name)), None)
    if place != "params" or entries is None:
        entries, wrong = _by_names(names, sizes, [r for r in rules if r not in patterns])
    else:
        wrong = _twice(entries)
        if len(entries) > len(shape):
            return PartitionSpec(), [f"a rule splits {len(entries)} dimensions: {entries}"]
    entries = tuple(entries) + (None,) * (len(shape) - len(entries))
    for i, (size, entry) in enumerate(zip(shape, entries, strict=True)):
        parts = n_parts((entry,), sizes)
        if size % parts:
            called = f" ({names[i]})" if names and names[i] is not None else ""
            wrong.append(
                f"dimension {i}{called} of size {size} does not divide by {parts}, the size of "
                f"{_quoted(axes_of(entry))}"
            )
    return PartitionSpec(*entries), wrong


def _by_names(names: Names, sizes: Mapping[str, int], rules: Rules) -> tuple[list[Axes], list[str]]:
    """Returns the axes of named dimensions: each by the first rule whose axes are free."""
    # A name without a rule may be a mesh axis itself (nn.with_partitioning).
    ruled = {name for name, _ in rules}
    itself = [n for n in names if n not in ruled and axes_of(n) and set(axes_of(n)) <= {*sizes}]
    found: dict[int, Axes] = {}
    used: set[str] = set()
    for key, value in (*rules, *((name, name) for name in itself)):
        for i, name in enumerate(names):
            if name == key and i not in found and not used & {*axes_of(value)}:
                found[i] = value
                used |= {*axes_of(value)}
    wrong = [
        f"dimension {i} ({name}) should be split over "
        f"{_quoted(axis for key, value in rules if key == name for axis in axes_of(value))}, "
        "which another dimension is split over already; add a rule "
        f"({name!r}, None) after the others to leave it whole there"
        for i, name in enumerate(names)
        if i not in found and (name in ruled or name in itself)
    ]
    return [found.get(i) for i in range(len(names))], wrong


def _twice(entries: Iterable[Axes]) -> list[str]:
    axes = [axis for entry in entries for axis in axes_of(entry)]
    twice = sorted({axis for axis in axes if axes.count(axis) > 1})
    return [f"a rule splits two dimensions over {_quoted(twice)}"] if twice else []


def _unknown_axes(
    names: Mapping[str, Names], arrays: Mapping[str, PyTree], sizes: Mapping[str, int], rules: Rules
) -> Iterator[str]:
    """Yields problems: rules with axes that the mesh lacks, and the parameters they match."""
    for key, value in rules:
        is_pattern = isinstance(value, PartitionSpec)
        wanted = {a for entry in (value if is_pattern else (value,)) for a in axes_of(entry)}
        if unknown := sorted(wanted - {*sizes}):
            paths = [path for path in arrays if path.startswith("params/")]
            hit = [
                path
                for path in paths
                if (re.fullmatch(key, path[7:]) if is_pattern else key in names.get(path, ()))
            ]
            yield (
                f"the rule ({key!r}, {value!r}) names {_quoted(unknown)}, which the mesh does not "
                f"have; it is for {', '.join(hit) or 'no parameter'}"
            )


def _spread(shape: tuple[int, ...], spec: PartitionSpec, axis: str, size: int) -> PartitionSpec:
    """Splits the largest dimension that is whole and divisible by the axis, if there is one."""
    entries = tuple(spec) + (None,) * (len(shape) - len(spec))
    free = [i for i, entry in enumerate(entries) if entry is None and shape[i] % size == 0]
    if math.prod(shape) < SMALL or any(axis in axes_of(entry) for entry in entries):
        free = []
    chosen = max(free, key=lambda i: shape[i], default=None)
    return PartitionSpec(*(axis if i == chosen else entry for i, entry in enumerate(entries)))


def _quoted(axes: Iterable[str]) -> str:
    return " and ".join(f"{axis!r}" for axis in axes)


def _message(sizes: Mapping[str, int], problems: Sequence[str]) -> str:
    mesh = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    return f"Cannot lay out the state over the mesh ({mesh}):\n  " + "\n  ".join(problems)
