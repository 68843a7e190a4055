"""Attributes: detects changes of an NNX instance other than in the values of its variables."""
# This imports NNX: import it only where a model is an NNX module.

import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from flaxfit.modules._flags import switches

_ARRAYS = (jax.Array, np.ndarray)
_SWITCHES = frozenset(switches(train=True))
_LIBRARIES = {*sys.stdlib_module_names, "jax", "jaxlib", "flax", "numpy"} - {"types", "argparse"}
"""Packages whose objects are opaque; `types` and `argparse` have namespaces, which are not."""

Parts = Mapping[Any, Any]


class Attributes:
    """Records the attributes of an NNX instance, to detect changes.

    It looks into modules, containers and objects of user classes, to find changes in place. It
    ignores values of variables and arrays, sown values, and flags such as `deterministic`, which
    are set for each use.

    >>> layer = nnx.Dropout(0.5)
    >>> attributes = Attributes(layer)
    >>> layer.rate = 0.1
    >>> attributes.were_changed(), attributes.were_changed()
    (True, False)
    """

    def __init__(self, module: nnx.Module):
        self._module = module
        self._see()

    def were_changed(self) -> bool:
        """Returns whether attributes have changed since the last call, or since construction."""
        if all(map(_is_untouched, self._seen)):
            return False
        before = self._seen
        self._see()
        entries = itertools.zip_longest(_entries(before), _entries(self._seen))
        return not all(itertools.starmap(_are_equal, entries))

    def arrays(self) -> list[Any]:
        """Returns the arrays of the instance that training changes, without random streams."""
        values = [variable.get_raw_value() for variable in self._variables]
        plain = [
            part
            for each in self._holders
            for part in each.parts_of(each.thing).values()
            if isinstance(part, _ARRAYS)
        ]
        return jax.tree.leaves((values, plain))

    def _see(self) -> None:
        self._seen = [*_walk(self._module)]
        variables = [each.thing for each in self._seen if each.parts_of is _metadata]
        self._variables = [each for each in variables if not issubclass(type(each), nnx.RngState)]
        self._holders = [
            each
            for each in self._seen
            if each.is_state and any(isinstance(part, _ARRAYS) for part in each.parts.values())
        ]


class _Seen(NamedTuple):
    """An object and its parts at some time."""

    thing: Any
    parts_of: Callable[[Any], Parts]
    parts: Parts
    is_state: bool
    """Whether its arrays are in the module's state; else they are constants in programs."""


def _is_untouched(seen: _Seen) -> bool:
    """Returns whether the parts of an object are still the same objects."""
    thing, parts_of, before, _ = seen
    now = parts_of(thing)
    return [*now] == [*before] and all(map(operator.is_, now.values(), before.values()))


def _walk(module: nnx.Module) -> Iterator[_Seen]:
    """Yields the objects with parts in a module, each once and in a fixed order."""
    left: list[tuple[Any, Callable[[Any], Parts], bool]] = [(module, vars, True)]
    known = {id(module)}
    while left:
        thing, parts_of, is_state = left.pop()
        parts = dict(parts_of(thing))
        is_state = is_state and not jax.tree_util.all_leaves([thing])
        yield _Seen(thing, parts_of, parts, is_state)
        for name, part in parts.items():
            divide = None if is_of_nnx(name) else divider(type(part))
            if divide is not None and id(part) not in known:
                known.add(id(part))
                left.append((part, divide, is_state))


def is_of_nnx(name: Any) -> bool:
    return isinstance(name, str) and name.startswith("_pytree__")


@functools.cache
def divider(kind: type) -> Callable[[Any], Parts] | None:
    """Returns a function from objects of a type to their parts; None if opaque."""
    if issubclass(kind, nnx.Pytree):
        return vars
    if issubclass(kind, nnx.Variable):
        return _metadata
    if issubclass(kind, Mapping):
        return dict
    if issubclass(kind, list | tuple):
        return lambda items: dict(enumerate(items))
    if issubclass(kind, Set):
        return dict.fromkeys
    is_of_user = kind.__module__.partition(".")[0] not in _LIBRARIES
    is_called = any("__call__" in vars(each) for each in kind.__mro__)
    return vars if is_of_user and kind.__dictoffset__ and not is_called else None


def _metadata(variable: nnx.Variable) -> Parts:
    return variable.get_metadata()


class _Entry(NamedTuple):
    """An attribute in a comparable form."""

    name: Any
    number: int | None
    """The number of its object, if that has parts."""
    value: Any
    """The value of an opaque attribute."""


def _entries(seen: list[_Seen]) -> Iterator[_Entry]:
    left = {id(each.thing) for each in seen if _is_left_by_call(each)}
    kept = [each for each in seen if id(each.thing) not in left]
    numbers = {id(each.thing): number for number, each in enumerate(kept)}
    for thing, parts_of, parts, is_state in kept:
        values = jax.tree.leaves(thing.get_raw_value()) if parts_of is _metadata else ()
        yield _Entry(type(thing), None, [np.shape(each) for each in values])
        for name, part in parts.items():
            is_array = is_state and isinstance(part, _ARRAYS)
            if is_array or id(part) in left or is_of_nnx(name):
                continue
            if id(part) in numbers:
                yield _Entry(name, numbers[id(part)], None)
            elif not (
                name in _SWITCHES
                and isinstance(part, bool | None)
                and isinstance(thing, nnx.Module)
            ):
                yield _Entry(name, None, part)


def _are_equal(one: _Entry | None, other: _Entry | None) -> bool:
    """Returns whether two entries are equal; 1 differs from 1.0, and 0.0 from -0.0."""
    if one is None or other is None or one[:2] != other[:2]:
        return False
    a, b = one.value, other.value
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, _ARRAYS):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, int | float | complex | np.generic):
        return repr(a) == repr(b)
    try:
        return bool(a == b)
    except Exception:  # A table, say, compares its cells.
        return False


def _is_left_by_call(seen: _Seen) -> bool:
    """Returns whether `sow` has stored this."""
    return seen.parts_of is _metadata and isinstance(seen.thing.get_raw_value(), tuple)
