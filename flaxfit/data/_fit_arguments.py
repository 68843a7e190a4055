"""Converts the data arguments of `fit`, `evaluate` and `predict` to one form."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from flaxfit.data._batch import is_given, three_parts
from flaxfit.data._class_weights import WEIGHTS_BY_OUTPUT, weights_by_class
from flaxfit.data._columns import common_length
from flaxfit.data._mapped import rows_at
from flaxfit.data._sample_weights import (
    by_output,
    check_weights,
    check_weights_shape,
    without_masked,
)
from flaxfit.tree import Data, PyTree, check_dense, is_array, is_named, is_node, product, to_numpy

_SCALARS = (bool, int, float, complex, str, bytes, np.generic)


def prepare(
    x: Data,
    y: PyTree = None,
    sample_weight: PyTree = None,
    class_weight: Mapping[int, float] | str | None = None,
    validation_split: float = 0.0,
    validation_data: Data = None,
    seed: int = 0,
    outputs: Sequence[str] = (),
) -> tuple[Data, Data]:
    """Returns training and validation data: arrays as `(x, y, weights)`, other data unchanged.

    Without `y`, a tuple or a mapping of arrays is a data set, `(x, y)` or `(x, y, weights)`; a
    list is a sequence of batches, unless it is made of numbers. Weights may be a mapping by the
    names of outputs, or a sequence in the order of `outputs`. The `class_weight` of batches is left
    to a `ClassWeightedStream`.
    """
    arrays = _arrays_of(x, y, sample_weight, outputs=outputs)
    if _is_pair(validation_data):
        validation_data = tuple(validation_data)
    held_out = _arrays_of(validation_data, owner="validation_data", outputs=outputs)
    validation_data = validation_data if held_out is None else held_out
    if arrays is None:
        given = {"y": y, "sample_weight": sample_weight}
        wrong = [name for name, value in given.items() if value is not None]
        if wrong := wrong + ["validation_split"] * bool(validation_split):
            raise ValueError(
                f"{', '.join(wrong)} can be used with arrays only, but x is a "
                f"{type(x).__name__}: yield batches (inputs, targets, weights) and pass "
                "validation_data instead."
            )
        return x, validation_data
    all_y = arrays[1]
    if validation_split:
        if validation_data is not None:
            raise ValueError("Give either validation_data or validation_split, not both.")
        arrays, validation_data = split(arrays, validation_split, seed)
    if class_weight is None:
        return arrays, validation_data
    x, y, w = arrays
    if isinstance(w, Mapping):
        raise ValueError(WEIGHTS_BY_OUTPUT)
    # Class weights apply to training data only.
    by_class = weights_by_class(y, class_weight, w, all_of=all_y)
    return (x, y, by_class if w is None else product(w, by_class)), validation_data


def prepare_inputs(x: Data) -> Data:
    """Returns data to predict: arrays as inputs `(x, None, None)`, other data unchanged.

    A list of arrays is several inputs, as in `fit` with a `y`.
    """
    is_inputs = not _is_list(x) or all(is_array(part) or _is_numbers(part) for part in x)
    return (as_arrays(x), None, None) if is_inputs and _holds_arrays(x) else x


def split(arrays: tuple[PyTree, ...], fraction: float, seed: int) -> tuple[PyTree, ...]:
    """Splits off a random fraction of the examples for validation: `(training, validation)`."""
    if not 0 < fraction < 1:
        raise ValueError(f"validation_split must lie between 0 and 1, got {fraction}.")
    n = len(jax.tree.leaves(arrays)[0])
    n_validation = max(1, round(n * fraction))
    if n_validation >= n:
        raise ValueError(f"validation_split={fraction} leaves none of {n} examples to train on.")
    order = np.random.default_rng((seed, 0x5B11)).permutation(n)
    validation, training = np.sort(order[:n_validation]), np.sort(order[n_validation:])
    return tuple(
        jax.tree.map(lambda a, r=rows: rows_at(a, r), arrays) for rows in (training, validation)
    )


def as_arrays(part: PyTree) -> PyTree:
    """Converts lists of numbers and tables in a part of the data to arrays."""
    if _is_numbers(part):
        try:
            return np.asarray(part)
        except ValueError as error:
            raise ValueError(
                "Cannot convert lists of different lengths to an array: pad them to one length; in "
                f"a list of batches (x, y), write np.asarray(x) for lists of numbers. {error}"
            ) from error
    if isinstance(part, Mapping):
        return {name: as_arrays(value) for name, value in part.items()}
    if is_named(part):
        return type(part)(*map(as_arrays, part))
    if isinstance(part, list | tuple):
        return tuple(as_arrays(value) for value in part)
    if isinstance(part, jax.Array):
        return part
    check_dense(part)
    return jax.tree.map(as_arrays, part) if is_node(part) else to_numpy(part)


def _arrays_of(
    data: Data,
    y: PyTree = None,
    weights: PyTree = None,
    *,
    owner: str = "x",
    outputs: Sequence[str] = (),
) -> tuple[PyTree, ...] | None:
    """Returns inputs, targets and weights of a data set as arrays; None if the data is batches."""
    if y is not None:
        if not _holds_arrays(data) or _is_list(data) and any(map(_is_batch, data)):
            return None
        parts = (data, y, weights)
    elif isinstance(data, tuple | Mapping):
        parts = three_parts(data, owner)
        for part in filter(is_given, parts):
            if not _holds_arrays(part):
                wrong = next((x for x in jax.tree.leaves(part) if not is_array(x)), part)
                raise TypeError(
                    f"{owner} is a data set and must hold arrays, got {type(wrong).__name__}: "
                    f"{wrong!r:.60}. Pass batches in a list or a loader."
                )
        if weights is not None and parts[2] is not None:
            raise ValueError("Give weights either in the data set or as sample_weight, not both.")
        parts = (*parts[:2], parts[2] if weights is None else weights)
    elif _holds_arrays(data) and not _is_list(data):
        parts = (data, None, weights)
    else:
        return None
    *parts, weights = parts
    if is_given(weights) and not _is_numbers(weights):
        weights = by_output(weights, outputs)
    parts[1], weights = without_masked(parts[1], weights)
    x, y, w = (as_arrays(part) if is_given(part) else None for part in (*parts, weights))
    name = "sample_weight" if owner == "x" else f"the weights of {owner}"
    if w is not None:
        check_weights_shape(w, name)
        check_weights(w, name)
        w = jax.tree.map(lambda each: each.astype(np.float32), w)
    names = ("x", "y", name) if owner == "x" else (f"{owner}[0]", f"{owner}[1]", name)
    common_length((x, y, w), names)
    return x, y, w


def _is_pair(data: Data) -> bool:
    """Returns whether a list is Keras's `[x, y]` or `[x, y, weights]` rather than batches."""
    if not _is_list(data) or not 2 <= len(data) <= 3 or not _holds_arrays(data):
        return False
    return any(is_array(part) or _is_numbers(part) for part in data[:2])


def _is_list(data: Data) -> bool:
    """Returns whether data is a list of arrays or of other objects, rather than of numbers."""
    return isinstance(data, list) and not _is_numbers(data)


def _is_numbers(part: PyTree) -> bool:
    """Returns whether a part of the data is a (nested) list of numbers, or of text."""
    if not isinstance(part, list | tuple) or is_named(part):
        return False
    while isinstance(part, list | tuple) and part:
        part = part[0]
    return isinstance(part, _SCALARS) or (is_array(part) and np.ndim(part) == 0)


def _holds_arrays(part: PyTree) -> bool:
    if _is_numbers(part):
        return True
    if isinstance(part, list | tuple | Mapping):
        values = part.values() if isinstance(part, Mapping) else part
        return bool(part) and all(map(_holds_arrays, values))
    check_dense(part)
    return (is_array(part) and not hasattr(part, "__next__")) or is_node(part)


def _is_batch(part: PyTree) -> bool:
    """Returns whether an element of a list is a tuple, such as a pair of inputs and targets."""
    return isinstance(part, list | tuple) and not _is_numbers(part)
