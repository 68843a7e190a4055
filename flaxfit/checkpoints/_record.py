"""The record of a step: everything except arrays, as JSON, validated on read."""

import json
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.checkpoints import _folder, _orbax, _seal
from flaxfit.checkpoints._seal import Damaged
from flaxfit.display import first_line
from flaxfit.tree import Json

FORMAT = 2
Record: TypeAlias = dict[str, Json]
_KINDS_OF_KEYS = frozenset({"threefry2x32", "rbg", "unsafe_rbg"})


def read_record(path: Path) -> Record:
    """Reads the record of a step, compares it with the seal, and validates it."""
    try:
        _seal.check(path, _orbax.RECORD)
        record = _orbax.read_record(path)
    except (OSError, ValueError, RecursionError) as error:
        _seal.raise_if_unread(error, path)
        raise Damaged(f"its record cannot be read ({first_line(error)})") from error
    match record:
        case {"format": int(number)} if number != FORMAT:
            raise ValueError(
                f"Cannot read the checkpoint {path}: it has format {number}, this version of "
                f"flaxfit reads {FORMAT}. Install the version that wrote it."
            )
        case {
            "format": int(),
            "step": int(step),
            "metrics": {**metrics},
            "history": _,
            "data_state": _,
            "callback_states": {},
            "versions": {},
            "environment": {},
            "monitor": None | {"name": str(), "mode": "min" | "max"},
            "running": None | {},
            "n_completed_steps": int(),
            "n_examples": int(),
            "sums": None | {},
            "stop": bool(),
            "arrays": {**arrays},
        } if all(isinstance(value, int | float | list) for value in metrics.values()):
            if step != _folder.step_of(path.name):
                raise Damaged(f"its record is that of step {step}")
            for name, description in arrays.items():
                _check_description(name, description)
            return record
    raise Damaged("its record is incomplete")


def _check_description(name: str, description: Json) -> None:
    match description:
        case {"shape": [*shape], "dtype": str(), "digest": str(), "random_bits": str(kind)}:
            is_whole = kind in _KINDS_OF_KEYS and _are_sizes(description.get("words"))
        case {"shape": [*shape], "dtype": str(dtype), "digest": str()}:
            is_whole = _is_dtype(dtype)
        case _:
            shape, is_whole = None, False
    if not is_whole or not _are_sizes(shape):
        raise Damaged(f"its record does not describe {name:.100}")


def _are_sizes(shape: Json) -> bool:
    return isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**63 for n in shape)


def _is_dtype(name: str) -> bool:
    try:
        dtype = jnp.dtype(name)
    except (TypeError, ValueError):
        return False
    return str(dtype) == name and (dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number))


def as_plain_json(record: Json) -> Json:
    """Returns a deep copy of a record, as JSON would read it back."""
    try:
        return json.loads(json.dumps(record, default=_number))
    except TypeError as error:
        raise TypeError(
            "A checkpoint file keeps metrics, history, data position and callback states as "
            f"JSON, which these are not: {error}."
        ) from error


def _number(value: object) -> Json:
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return value.tolist()
    raise TypeError(f"got {type(value).__name__}: {value!r:.60}")
