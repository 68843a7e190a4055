"""Finds the modes of an NNX module, such as `train`, and sets them in a copy."""
# This imports NNX: import it only where a model is an NNX module.

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from flaxfit.tree import parameters


def viewed(module: Any, modes: Mapping[str, Any]) -> Any:
    """Copies a module, sharing its variables, and sets modes in the copy and its submodules."""
    parts = copied(module)
    set_modes(parts, modes)
    return parts[-1]


def copied(module: nnx.Module) -> list[nnx.Module]:
    """Copies a module, sharing its variables; returns the submodules, and the module last.

    `nnx.clone` and `nnx.iter_modules` do the same in six times the time.
    """
    copies: dict[int, Any] = {}

    def copy(node: Any) -> Any:
        if not _is_subclass(type(node), nnx.Pytree):
            return node
        if id(node) not in copies:
            new = copies[id(node)] = object.__new__(type(node))
            vars(new).update(jax.tree.map(copy, vars(node), is_leaf=_is_node))
        return copies[id(node)]

    copy(module)
    return [part for part in reversed(copies.values()) if isinstance(part, nnx.Module)]


def set_modes(parts: Sequence[nnx.Module], modes: Mapping[str, Any]) -> None:
    """Sets modes in the modules that have them.

    A mode is an argument of a module's `set_view`, or an attribute that is a bool or None.
    """
    for part in parts:
        set_view = getattr(part, "set_view", None)
        if set_view is not None:
            set_view(**{name: modes[name] for name in modes if _takes_mode(part, name)})
        for name in modes:
            if _has_switch(part, name):
                setattr(part, name, modes[name])


def unknown_modes(parts: Sequence[nnx.Module], modes: Collection[str]) -> list[str]:
    """Returns the mode names that no submodule defines."""
    return [
        name
        for name in modes
        if not any(_has_switch(part, name) or _takes_mode(part, name) for part in parts)
    ]


def _is_node(x: object) -> bool:
    return _is_subclass(type(x), nnx.Pytree, nnx.Variable)


@functools.cache
def _is_subclass(kind: type, *classes: type) -> bool:
    # Cached: NNX computes this in Python, and a large module has thousands of attributes.
    return issubclass(kind, classes)


def _has_switch(part: nnx.Module, name: str) -> bool:
    # Not `getattr(part, name)`: do not call properties or `__getattr__`.
    return isinstance(vars(part).get(name, getattr(type(part), name, ...)), bool | None)


def _takes_mode(part: nnx.Module, name: str) -> bool:
    found = parameters(getattr(part, "set_view", None))
    return name in found or any(p.kind == p.VAR_KEYWORD for p in found.values())
