"""Adafactor's statistics: from mesh-TensorFlow's variables to T5X's names, and to optax's."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from flaxfit.importers._translator import Translation
from flaxfit.tree._types import PyTree

SLOTS = {"_slot_v": "v", "_slot_vr": "v_row", "_slot_vc": "v_col", "_slot_m": "m"}
"""The ends of mesh-TensorFlow's names, and T5X's names."""

PREFIX = "state/param_states/"
KEPT = "|".join(
    ("hyperparams", "hyperparams_states", "mini_step", "skip_state", "acc_grads", "loss_scale")
)
"""Parts of an optimizer's state that are no statistics: no checkpoint has them."""
_OPTAX_NAMES = {"v": "v", "v_row": "v_row", "v_col": "v_col", "ema": "m"}


def turn_squares(opts: Any, values: Mapping[str, PyTree]) -> dict[str, Any]:
    """Exchanges the statistics of rows and columns of square matrices.

    mesh-TensorFlow's `vr` lacks the largest dimension, of two as large the first; the `v_row` of
    T5X and optax lacks the second. Their shapes agree, so that nothing else would notice.
    """
    turned = dict(values)
    for name, value in values.items():
        path = PREFIX + name.removeprefix("target/")
        row, column = f"{path}/v_row", f"{path}/v_col"
        is_square = len(value.shape) == 2 and value.shape[0] == value.shape[1]
        if name.startswith("target/") and is_square and row in values and column in values:
            turned[row], turned[column] = values[column], values[row]
    return turned


def add_dummies(opts: Any, values: Mapping[str, PyTree]) -> dict[str, Any]:
    """Adds the single zeros that Adafactor keeps in the place of statistics it does not use."""
    added = dict(values)
    for name in values:
        path = PREFIX + name.removeprefix("target/")
        slots = [slot for slot in ("v", "v_row", "v_col", "m") if f"{path}/{slot}" in values]
        if name.startswith("target/") and slots:
            for slot in SLOTS.values():
                added.setdefault(f"{path}/{slot}", np.zeros(1, np.float32))
    return added


def as_in(leaves: Mapping[str, PyTree], translation: Translation) -> Translation:
    """The statistics under the names of a target: T5X's as they are, or those of optax's state.

    optax keeps one tree for each kind of statistic, somewhere in its state, and counts its steps
    there; a moving average of the parameters becomes the parameters. Of a target that keeps no
    statistics, none are taken.
    """
    values, sources = dict(translation.values), dict(translation.sources)
    # The single zeros that stand for a statistic are none where the target wants one.
    for name in list(values):
        leaf = leaves.get(name)
        if leaf is not None and _is_dummy(values[name]) and np.shape(leaf) != (1,):
            del values[name]
    wanted = [name for name in leaves if name.startswith(PREFIX)]
    used = set()
    for name in wanted:
        source = _source(name, values)
        if source and _is_dummy(values[source]) and np.shape(leaves[name]) != (1,):
            continue
        if source is not None and source != name:
            values[name] = values[source]
            sources[name] = sources.get(source, source)
            used.add(source)
    no_statistic = rf"{PREFIX}(.*/)?(count|gradient_step|({KEPT}|average)(/.*)?)"
    keeps_none = all(re.fullmatch(no_statistic, name) for name in wanted)
    for name, value in translation.values.items():
        if not name.startswith(PREFIX) or name in leaves:
            continue
        if name in used or keeps_none or (used and _is_dummy(value)):
            values.pop(name, None)
    return dataclasses.replace(translation, values=values, sources=sources)


def _is_dummy(value: Any) -> bool:
    """Whether it is one of the zeros that `add_dummies` adds: what is read is lazy."""
    return isinstance(value, np.ndarray) and value.shape == (1,)


def _source(name: str, values: Mapping[str, PyTree]) -> str | None:
    """Which of T5X's names an array of the target has."""
    if name in values:
        return name
    parts = name.split("/")
    if parts[-1] in ("count", "gradient_step"):
        return "state/step" if "state/step" in values else None
    for number, part in enumerate(parts):
        if part == "average":
            source = f"target/{'/'.join(parts[number + 1 :])}"
            return source if source in values else None
        if part in _OPTAX_NAMES:
            source = f"{PREFIX}{'/'.join(parts[number + 1 :])}/{_OPTAX_NAMES[part]}"
            if source in values:
                return source
    return None
