"""The reprs of tasks: options that differ from the defaults, and shapes instead of data."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from flaxfit.data import ArrayStream
from flaxfit.modules._switch import handle_of
from flaxfit.optim._optimizer import Adjustable
from flaxfit.tree import Data


def describe(task: Any) -> str:
    """Returns the repr of a task, with the fields that differ from the defaults."""
    parts = [
        f"{field.name}={words}"
        for field in dataclasses.fields(task)
        if not _is_default(field, value := getattr(task, field.name))
        and (words := _in_words(field.name, value))
    ]
    return f"{type(task).__name__}({', '.join(parts)})"


def name_of(function: Any) -> str:
    """Returns the name of a module's class, of a function, or of a value's class."""
    handle = handle_of(function)
    module = None if handle is None else handle.module()
    named = function if module is None else module
    return getattr(named, "__name__", type(named).__name__)


def describe_loss(loss: Any) -> str:
    """Returns the name of a loss, or the names of losses by output."""
    if (several := getattr(loss, "losses", None)) is not None:
        return f"{{{', '.join(f'{name}: {name_of(each)}' for name, each in several.items())}}}"
    return name_of(loss)


def describe_data(data: Data) -> str:
    """Returns the shapes and dtypes of arrays, and the type of anything else."""
    if isinstance(data, ArrayStream):
        return repr(data)
    leaves = jax.tree.leaves(data) if isinstance(data, tuple | Mapping) else [data]
    if not all(hasattr(leaf, "dtype") for leaf in leaves):
        return type(data).__name__
    shown = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", data)
    return str(shown).replace("'", "")


def _is_default(field: dataclasses.Field, value: Any) -> bool:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    is_plain = isinstance(value, bool | int | float | str | tuple | dict | None)
    return value is default or (is_plain and isinstance(default, type(value)) and value == default)


def _in_words(name: str, value: Any) -> str:
    """Returns a short text for the value of a field, or ""."""
    if name == "optimizer":  # Optax transformations are functions without a name.
        return repr(value) if isinstance(value, Adjustable) else ""
    if name == "loss":
        return describe_loss(value)
    if name == "data":
        return describe_data(value)
    if name in ("metrics", "companions"):
        return f"[{', '.join(value)}]" if value else ""
    if callable(value):
        return name_of(value)
    return repr(value)
