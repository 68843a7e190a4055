"""The normal form of a batch: what came from a stream as `Batch(inputs, targets, weights)`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from redex.util import expand_to_tuple

_ROLES = (("x", "y", "w"), ("inputs", "targets", "weights"))
_FORMS = "x, (x, y), ((x, ...), (y, ...)), (x, y, weights) or a mapping of these"


class Batch(NamedTuple):
    """One batch in normal form.

    >>> Batch((np.ones((2, 3)),), (np.zeros(2),)).weights is None
    True

    Attributes:
      inputs: positional inputs of the model, or a dict of keyword inputs.
      targets: what the loss and the metrics compare the outputs with; may be empty.
      weights: one weight per example, shape `(batch,)`, or None for equal weights.
    """

    inputs: tuple[Any, ...] | dict[str, Any]
    targets: tuple[Any, ...] = ()
    weights: Any = None


def normalize(item: Any) -> Batch:
    """Brings what a stream yielded into the form `Batch(inputs, targets, weights)`.

    Lists count as tuples (torch loaders yield lists). A mapping with the keys `x, y, w` or
    `inputs, targets, weights` names the parts; any other mapping is keyword inputs without
    targets. A mapping in the place of the inputs is passed to the model as keyword arguments.

    >>> normalize((np.ones((2, 3)), np.zeros(2))).targets
    (array([0., 0.], dtype=float32),)

    Raises:
      TypeError: the item is none of the accepted forms.
      ValueError: the parts hold different numbers of examples.
    """
    if isinstance(item, Batch):
        return item
    if item is None:
        raise TypeError(f"A batch must be made of arrays, {_FORMS}; got None.")
    if isinstance(item, Mapping):
        roles = next((r for r in _ROLES if r[0] in item and item.keys() <= set(r)), None)
        if roles:
            x, y, w = map(item.get, roles)
            parts = (x, () if y is None else y) + (() if w is None else (w,))
        else:
            parts = (item,)
    else:
        parts = tuple(item) if isinstance(item, list | tuple) else (item,)
    if not 1 <= len(parts) <= 3:
        raise TypeError(f"A batch has 1 to 3 parts, {_FORMS}; got {len(parts)} parts.")
    weights = parts[2] if len(parts) == 3 else None
    batch = Batch(
        _inputs(parts[0]),
        _part(parts[1]) if len(parts) > 1 else (),
        None if weights is None else _array(weights),
    )
    _check_lengths(batch)
    return batch


def n_examples(batch: Batch) -> int:
    """How many examples the batch holds."""
    return jax.tree.leaves(batch)[0].shape[0]


def call(apply: Any, variables: Any, inputs: Any, **options: Any) -> Any:
    """Calls an apply function with the inputs of a batch, positional or by keyword."""
    if isinstance(inputs, dict):
        return apply(variables, **inputs, **options)
    return apply(variables, *inputs, **options)


def _inputs(part: Any) -> tuple[Any, ...] | dict[str, Any]:
    if isinstance(part, Mapping):
        return {str(name): jax.tree.map(_array, value) for name, value in part.items()}
    return _part(part)


def _part(part: Any) -> tuple[Any, ...]:
    part = tuple(part) if isinstance(part, list) else part
    return jax.tree.map(_array, expand_to_tuple(part))


def _array(leaf: Any) -> Any:
    """The leaf as an array in the width that JAX computes in: 64 bits become 32, quietly."""
    if isinstance(leaf, jax.Array):
        return leaf
    if not hasattr(leaf, "__array__") or isinstance(leaf, np.generic):
        raise TypeError(
            f"A batch must be made of arrays, {_FORMS}; got {type(leaf).__name__}: {leaf!r:.60}"
        )
    array = np.asarray(leaf)
    if array.dtype.kind not in "biufcV":
        raise TypeError(
            f"A batch must hold numbers, got an array of dtype {array.dtype} and shape "
            f"{array.shape}: encode it as numbers first."
        )
    if array.ndim == 0:
        raise TypeError(f"A batch must hold arrays of shape (batch, ...), got the scalar {array}.")
    narrow = jax.dtypes.canonicalize_dtype(array.dtype)
    return array if array.dtype == narrow else array.astype(narrow)


def _check_lengths(batch: Batch) -> None:
    lengths = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    if len(lengths) == 1 and 0 not in lengths:
        return
    if not lengths or 0 in lengths:
        raise ValueError("A batch holds no examples: check that the data is not empty.")
    shapes = jax.tree.map(lambda leaf: leaf.shape, batch)
    raise ValueError(
        "The parts of a batch hold different numbers of examples: "
        f"inputs {shapes.inputs}, targets {shapes.targets}, weights {shapes.weights}."
    )
