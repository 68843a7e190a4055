"""The normal form of a batch: what came from a stream as `Batch(inputs, targets, weights)`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from redex.util import expand_to_tuple

from flaxfit.data._sample_weights import check_weights_shape
from flaxfit.tree._dtypes import (
    check_dense,
    is_array,
    is_named,
    is_sparse,
    narrow,
    narrow_dtype,
    to_numpy,
    widened,
)
from flaxfit.tree._types import ArrayLike, Data, PyTree

_ROLES = (("x", "y", "w"), ("inputs", "targets", "weights"))
# What the fields of a NamedTuple are called by the part that they hold.
_FIELDS = (
    {"x", "input", "inputs", "image", "images", "feature", "features"},
    {"y", "target", "targets", "label", "labels"},
    {"w", "weight", "weights", "sample_weight", "sample_weights"},
)
_FORMS = "x, (x, y), ((x, ...), (y, ...)), (x, y, weights) or a mapping of these"


class Batch(NamedTuple):
    """One batch in normal form.

    >>> Batch((np.ones((2, 3)),), (np.zeros(2),)).weights is None
    True

    Attributes:
      inputs: positional inputs of the model, or a dict of keyword inputs.
      targets: what the loss and the metrics compare the outputs with; may be empty.
      weights: one weight per example, shape `(batch,)`, or a mapping of such by the names of
        outputs; None for equal weights.
    """

    inputs: tuple[PyTree, ...] | dict[str, PyTree]
    targets: tuple[PyTree, ...] = ()
    weights: PyTree = None


def normalize(item: Any) -> Batch:
    """Brings what a stream yielded into the form `Batch(inputs, targets, weights)`.

    Lists count as tuples (torch loaders yield lists). A mapping with the keys `x, y, w` or
    `inputs, targets, weights` names the parts; any other mapping is keyword inputs without
    targets. A mapping in the place of the inputs is passed to the model as keyword arguments. A
    NamedTuple whose fields name the parts, such as `image, label`, holds these; any other, and a
    dataclass that is a pytree, is one input.

    >>> normalize((np.ones((2, 3)), np.zeros(2))).targets
    (array([0., 0.], dtype=float32),)

    Raises:
      TypeError: the item is none of the accepted forms.
      ValueError: the parts hold different numbers of examples.
    """
    if isinstance(item, Batch) and (item.weights is None or hasattr(item.weights, "dtype")):
        return item
    if item is None:
        raise TypeError(f"A batch must be made of arrays, {_FORMS}; got None.")
    parts = parts_of(item)
    if not 1 <= len(parts) <= 3:
        raise TypeError(f"A batch has 1 to 3 parts, {_FORMS}; got {len(parts)} parts.")
    inputs, targets, weights = (*parts, None, None)[:3]
    targets = () if targets is None else _part(targets)
    if weights is not None:
        weights = _weights(weights)
        check_weights_shape(weights, "weights")
    batch = Batch(_inputs(inputs), targets, weights)
    _check_lengths(batch)
    return batch


def detached(item: Any) -> Any:
    """An item with copies of its NumPy arrays, for one that is kept while its source goes on.

    A source may write each item into the memory of the one before.

    >>> x = np.zeros(2)
    >>> copy = detached({"x": x})
    >>> x += 1
    >>> copy
    {'x': array([0., 0.])}
    """
    try:
        return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, item)
    except ValueError:  # Names that cannot be sorted.
        return {name: detached(part) for name, part in item.items()}


def parts_of(data: Data) -> tuple[Any, ...]:
    """The parts x, y and weights of a batch or of a data set, as far as they are given.

    >>> parts_of({"y": 1, "x": 0}), parts_of([0, 1]), parts_of({"image": 2})
    ((0, 1, None), (0, 1), ({'image': 2},))
    """
    if is_named(data):
        names = _fields_by_part(data._fields)
        return tuple(name and getattr(data, name) for name in names) if names else (data,)
    if isinstance(data, Mapping):
        roles = next((r for r in _ROLES if r[0] in data and data.keys() <= set(r)), None)
        return tuple(map(data.get, roles)) if roles else (data,)
    return tuple(data) if isinstance(data, list | tuple) else (data,)


def _fields_by_part(fields: tuple[str, ...]) -> list[str | None] | None:
    """The fields that hold inputs, targets and weights; None if a field holds anything else."""
    found = [[name for name in fields if name.lower() in names] for names in _FIELDS]
    is_whole = sum(map(len, found)) == len(fields) and max(map(len, found)) == 1 and found[0]
    return [each[0] if each else None for each in found] if is_whole else None


def n_examples(batch: Batch) -> int:
    """How many examples the batch holds."""
    return jax.tree.leaves(batch)[0].shape[0]


def describe(batch: Batch) -> str:
    """The shapes of a batch by its parts.

    >>> describe(Batch((np.ones((2, 3)),), ({"a": np.ones(2)},)))
    "inputs ((2, 3),), targets ({'a': (2,)},), weights None"
    """
    shapes = jax.tree.map(lambda leaf: leaf.shape, batch)
    return f"inputs {shapes.inputs}, targets {shapes.targets}, weights {shapes.weights}"


def call(apply: Any, variables: PyTree, inputs: PyTree, **options: Any) -> Any:
    """Calls an apply function with the inputs of a batch, positional or by keyword."""
    if isinstance(inputs, dict):
        return apply(variables, **inputs, **options)
    return apply(variables, *inputs, **options)


def _inputs(part: PyTree) -> tuple[PyTree, ...] | dict[str, PyTree]:
    if isinstance(part, Mapping):
        return {str(name): _arrays(value) for name, value in part.items()}
    return _part(part)


def _part(part: PyTree) -> tuple[Any, ...]:
    part = tuple(part) if isinstance(part, list) else part
    return _arrays((part,) if is_named(part) else expand_to_tuple(part))


def _arrays(part: PyTree) -> Any:
    return jax.tree.map(_array, part, is_leaf=is_sparse)


def _weights(weights: PyTree) -> Any:
    """Weights in the precision that sums of many of them want: counts, a mask, or 16 bits, too."""
    if isinstance(weights, Mapping):
        return {str(name): _weights(each) for name, each in weights.items()}
    array = _array(weights)
    return array if array.dtype == np.float32 else array.astype(np.float32)


def _array(leaf: ArrayLike) -> Any:
    """The leaf as an array in the width that JAX computes in: 64 bits become 32, quietly."""
    if isinstance(leaf, jax.Array):
        return widened(leaf)
    check_dense(leaf)
    if not is_array(leaf):
        raise TypeError(
            f"A batch must be made of arrays, {_FORMS}; got {type(leaf).__name__}: {leaf!r:.60}"
        )
    array = to_numpy(leaf)
    if array.ndim == 0:
        raise TypeError(f"A batch must hold arrays of shape (batch, ...), got the scalar {array}.")
    return narrow(array, narrow_dtype(array.dtype))


def _check_lengths(batch: Batch) -> None:
    lengths = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    if len(lengths) == 1 and 0 not in lengths:
        return
    if not lengths or 0 in lengths:
        raise ValueError("A batch holds no examples: check that the data is not empty.")
    raise ValueError(f"The parts of a batch hold different numbers of examples: {describe(batch)}.")
