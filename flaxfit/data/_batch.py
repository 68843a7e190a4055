"""The normal form of a batch: `Batch(inputs, targets, weights)`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from redex.util import expand_to_tuple

from flaxfit.data._sample_weights import (
    by_output,
    check_weights_shape,
    is_list_of_weights,
    without_masked,
)
from flaxfit.tree import (
    Array,
    ArrayLike,
    Data,
    Function,
    PyTree,
    check_dense,
    is_array,
    is_named,
    is_sparse,
    narrow,
    narrow_dtype,
    to_numpy,
    widened,
)

_ROLES = (("x", "y", "w"), ("inputs", "targets", "weights"))
TARGET_NAMES = {"y", "target", "targets", "label", "labels"}
# Names of fields of a NamedTuple that hold inputs, targets and weights.
_FIELDS = (
    {"x", "input", "inputs", "image", "images", "feature", "features"},
    TARGET_NAMES,
    {"w", "weight", "weights", "sample_weight", "sample_weights"},
)
_WHOLE = (
    "Arrays of different lengths, such as those of a graph, and numbers beside the arrays need a "
    "task that neither pads nor divides its batches: TrainTask(pad=False) or step=, without "
    "accumulate, on one device or with strategy=Sharded()."
)
_NUMBERS = (bool, int, float, np.generic)
_FORMS = "x, (x, y), ((x, ...), (y, ...)), (x, y, weights) or a mapping of these"


class Batch(NamedTuple):
    """Holds one batch in normal form.

    >>> Batch((np.ones((2, 3)),), (np.zeros(2),)).weights is None
    True

    Attributes:
      inputs: positional inputs of the model, or a dict of keyword inputs.
      targets: the targets of the loss and the metrics; may be empty.
      weights: weights of shape `(batch,)`, or with more leading axes of the loss values, such as
        `(batch, tokens)`; or a mapping from output names to these; None for equal weights.
    """

    inputs: tuple[PyTree, ...] | dict[str, PyTree]
    targets: tuple[PyTree, ...] = ()
    weights: PyTree = None


def normalize(item: PyTree, *, is_whole: bool = False) -> Batch:
    """Converts an item of a stream to `Batch(inputs, targets, weights)`.

    Lists count as tuples, since torch loaders yield lists. A mapping with the keys `x, y, w` or
    `inputs, targets, weights` names the parts; any other mapping is keyword inputs without
    targets. Inputs that are a mapping are passed to the model as keyword arguments. The fields of a
    NamedTuple may name the parts, such as `image, label`; any other NamedTuple, and a dataclass
    that is a pytree, is one input. With `is_whole` the batch is neither padded nor divided: arrays
    may have any lengths, and numbers are allowed.
    """
    if isinstance(item, Batch) and (item.weights is None or hasattr(item.weights, "dtype")):
        return checked_batch(item)
    if item is None:
        raise TypeError(f"A batch must be made of arrays, {_FORMS}; got None.")
    inputs, targets, weights = three_parts(item, "a batch")
    targets, weights = without_masked(targets, weights)
    targets = () if targets is None else _part(targets)
    if isinstance(weights, Mapping) and not weights:
        weights = None
    if weights is not None:
        weights = _weights(weights)
        check_weights_shape(weights, "weights")
    batch = Batch(_inputs(inputs), targets, weights)
    if not is_whole or not jax.tree.leaves(batch):
        _check_lengths(batch)
    return batch


def checked_batch(item: Any) -> Batch:
    """Returns a batch that is in normal form already.

    Raises:
      TypeError: it is not a `Batch`, or holds an array instead of a tuple.
    """
    if not isinstance(item, Batch):
        raise TypeError(f"A step takes a Batch, Batch((x,), (y,)), got {type(item).__name__}.")
    if hasattr(item.inputs, "shape"):
        raise TypeError("A Batch holds tuples of arrays, got an array: write Batch((x,), (y,)).")
    return item


def detached(item: PyTree) -> PyTree:
    """Copies the NumPy arrays of an item, since its source may reuse their memory."""
    try:
        return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, item)
    except ValueError:  # JAX cannot sort its keys.
        return {name: detached(part) for name, part in item.items()}


def parts_of(data: Data) -> tuple[PyTree, ...]:
    """Returns the given parts of a batch or data set, in order: inputs, targets, weights."""
    if is_named(data):
        names = fields_by_part(data._fields)
        return tuple(name and getattr(data, name) for name in names) if names else (data,)
    if isinstance(data, Mapping):
        roles = next((r for r in _ROLES if r[0] in data and data.keys() <= set(r)), None)
        return tuple(map(data.get, roles)) if roles else (data,)
    return tuple(data) if isinstance(data, list | tuple) else (data,)


def three_parts(data: Data, owner: str) -> tuple[PyTree, PyTree, PyTree]:
    """Returns inputs, targets and weights of a batch or data set; None for a missing part."""
    parts = parts_of(data)
    if not 1 <= len(parts) <= 3:
        raise TypeError(
            f"{owner} must be (x, y) or (x, y, weights), got {len(parts)} parts. Put several "
            "inputs into their own tuple: ((x1, x2), y)."
        )
    inputs, targets, weights = (*parts, None, None)[:3]
    return inputs, targets, weights


def is_given(part: PyTree) -> bool:
    """Returns whether a part of the data is neither None nor an empty tuple."""
    return not (part is None or (isinstance(part, tuple) and not part))


def fields_by_part(fields: tuple[str, ...]) -> list[str | None] | None:
    """Returns the fields with inputs, targets and weights; None if any field is something else."""
    found = [[name for name in fields if name.lower() in names] for names in _FIELDS]
    is_whole = sum(map(len, found)) == len(fields) and max(map(len, found)) == 1 and found[0]
    return [each[0] if each else None for each in found] if is_whole else None


def n_examples(batch: Batch) -> int:
    """Returns the number of examples in a batch.

    If arrays differ in length, it is the length of the weights, else of the targets, else 1.
    """
    lengths = _lengths(batch)
    if len(lengths) != 1:
        by_role = (jax.tree.leaves(part) for part in (batch.weights, batch.targets))
        lengths = [leaf.shape[0] for leaves in by_role for leaf in leaves if leaf.shape]
    return next(iter(lengths), 1)


def has_rows(batch: Batch) -> bool:
    """Returns whether all arrays of a batch have the same length, and no leaf is a number."""
    return len(_lengths(batch)) == 1


def describe(batch: Batch) -> str:
    """Describes the shapes of a batch by part."""
    shapes = jax.tree.map(lambda leaf: leaf.shape, batch)
    return f"inputs {shapes.inputs}, targets {shapes.targets}, weights {shapes.weights}"


def call(apply: Function, variables: PyTree, inputs: PyTree, **options: Any) -> PyTree:
    """Calls an apply function with the inputs of a batch, positional or by keyword."""
    if isinstance(inputs, dict):
        return apply(variables, **inputs, **options)
    return apply(variables, *inputs, **options)


def _inputs(part: PyTree) -> tuple[PyTree, ...] | dict[str, PyTree]:
    if isinstance(part, Mapping):
        return {str(name): _arrays(value) for name, value in part.items()}
    return _part(part)


def _part(part: PyTree) -> tuple[PyTree, ...]:
    part = tuple(part) if isinstance(part, list) else part
    return _arrays((part,) if is_named(part) else expand_to_tuple(part))


def _arrays(part: PyTree) -> PyTree:
    return jax.tree.map(_array, part, is_leaf=is_sparse)


def _weights(weights: PyTree) -> PyTree:
    """Casts weights to float32, also counts, masks and 16-bit floats: sums need the precision."""
    if is_list_of_weights(weights):
        weights = by_output(weights)
    if isinstance(weights, Mapping):
        named = ((n if isinstance(n, str) else str(n), each) for n, each in weights.items())
        return {name: _weights(each) for name, each in named}
    array = _array(weights)
    return array if array.dtype == np.float32 else array.astype(np.float32)


def _array(leaf: ArrayLike) -> Array:
    """Converts a leaf to an array in the width that JAX computes in: 64 bits become 32."""
    if isinstance(leaf, jax.Array):
        return widened(leaf)
    check_dense(leaf)
    if not is_array(leaf) and not isinstance(leaf, _NUMBERS):
        raise TypeError(
            f"A batch must be made of arrays, {_FORMS}; got {type(leaf).__name__}: {leaf!r:.60}"
        )
    array = to_numpy(leaf)
    return narrow(array, narrow_dtype(array.dtype))


def _check_lengths(batch: Batch) -> None:
    for leaf in jax.tree.leaves(batch):
        if not leaf.shape:
            raise TypeError(
                f"A batch must hold arrays of shape (batch, ...), got the scalar {leaf}. Lists are "
                f"several arrays: write np.asarray(x) for a list of numbers or of lists. {_WHOLE}"
            )
    lengths = _lengths(batch)
    if len(lengths) == 1 and 0 not in lengths:
        return
    if not lengths or 0 in lengths:
        raise ValueError("A batch holds no examples: check that the data is not empty.")
    raise ValueError(
        f"The parts of a batch hold different numbers of examples: {describe(batch)}. {_WHOLE}"
    )


def _lengths(batch: Batch) -> set[int]:
    return {leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.shape}
