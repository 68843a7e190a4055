"""Hints about a first batch: what can be computed, but is probably a mistake."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Jaxpr

from flaxfit import losses
from flaxfit.data._batch import Batch, has_rows, n_examples
from flaxfit.step._jaxpr import equations
from flaxfit.step._origins import SIGMOID, SOFTMAX, Origins, origins_of
from flaxfit.task._multi_output import LossByOutput
from flaxfit.tree._paths import flat
from flaxfit.tree._types import PyTree

_LARGE = 1000
_OF_LOGITS = {
    SOFTMAX: (
        losses.crossentropy,
        losses.onehot_crossentropy,
        optax.softmax_cross_entropy,
        optax.softmax_cross_entropy_with_integer_labels,
    ),
    SIGMOID: (losses.binary_crossentropy, optax.sigmoid_binary_cross_entropy),
}


def hints_of(
    program: Jaxpr, arguments: PyTree, results: PyTree, loss: Any, batch: Batch, values: Batch
) -> list[str]:
    """Describes probable mistakes in a model, a loss and inputs.

    Args:
      program: the traced forward pass.
      arguments: its arguments, a tuple of the state, the batch and others.
      results: what it returns, a `ForwardPass`.
      loss: the loss of the task.
      batch: the batch that was traced; its scale is read.
      values: all data, if available, else the batch; its indices are read.
    """
    origins = origins_of(program)
    inputs = _numbered(arguments)[1].inputs
    return [
        *_of_probabilities(loss, _numbered(results).outputs, origins.outputs),
        *_of_look_ups(origins, {n: path for path, n in flat(inputs).items()}, values.inputs),
        *_of_convolutions(program, batch),
        *_of_scales(batch.inputs),
    ]


def _numbered(tree: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, range(len(leaves)))


def _of_probabilities(loss: Any, outputs: Any, origins: list[Any]) -> Iterator[str]:
    """Whether a loss of logits is given the outputs of a softmax or a sigmoid."""
    if isinstance(loss, LossByOutput):
        by_name, _ = loss.by_name(outputs)
        for name, each in loss.losses.items():
            for hint in _of_probabilities(each, (by_name or {}).get(name), origins):
                yield f"output {name!r}: {hint}"
        return
    if isinstance(loss, functools.partial) and loss.keywords.get("from_logits", True):
        loss = loss.func  # With options, such as a label smoothing.
    found = [origins[each] for each in jax.tree.leaves(outputs)]
    for last, those in _OF_LOGITS.items():
        if found == [last] and any(loss is each for each in those):
            yield (
                f"the model ends with a {last}, but the loss takes logits: return the input of the "
                f"{last}, or use losses.{_own_name(loss)}(from_logits=False)"
            )


def _own_name(loss: Any) -> str:
    if loss is optax.softmax_cross_entropy_with_integer_labels:
        return "crossentropy"
    own = (losses.crossentropy, losses.onehot_crossentropy, losses.binary_crossentropy)
    if any(loss is each for each in own):
        return loss.__name__
    return "onehot_crossentropy" if loss is optax.softmax_cross_entropy else "binary_crossentropy"


def _of_look_ups(origins: Origins, paths: dict[int, str], inputs: PyTree) -> Iterator[str]:
    """Whether an index has no row of its own in an embedding."""
    leaves = flat(inputs)
    for look_up in sorted(origins.look_ups):
        indices: Any = leaves.get(paths.get(look_up.input, ""))
        if not _is_at_hand(indices) or not np.size(indices):
            continue
        lowest, highest = np.min(indices), np.max(indices)
        if lowest < 0 or highest >= look_up.n_rows:
            advice = f"returns NaN for other indices. Give it {highest + 1:,} rows, or map"
            if -look_up.n_rows <= lowest and highest < look_up.n_rows:
                advice = "counts those below 0 from its end. Give what is missing its own row: map"
            yield (
                f"the indices in input {paths[look_up.input]!r} go from {lowest:,} to "
                f"{highest:,}, but an embedding of the model has {look_up.n_rows:,} rows and "
                f"{advice} the indices"
            )


def _of_convolutions(program: Jaxpr, batch: Batch) -> Iterator[str]:
    """Whether a convolution treats the examples of a batch as the rows of one image."""
    n = n_examples(batch) if has_rows(batch) else 1
    for equation in equations(program):
        if equation.primitive.name != "conv_general_dilated":
            continue
        axis = equation.params["dimension_numbers"].lhs_spec[0]
        is_grouped = equation.params["feature_group_count"] > 1
        images: Any = equation.invars[0].aval
        if images.shape[axis] == 1 and n > 1 and not is_grouped:
            yield (
                f"a convolution treats the batch of {n:,} examples as one image and mixes them: "
                "its inputs have no channel axis. Add one, x[..., None]"
            )
            return


def _of_scales(inputs: PyTree) -> Iterator[str]:
    """Whether inputs are far larger than models train well on."""
    for path, leaf in flat(inputs).items():
        if not _is_at_hand(leaf) or not np.size(leaf) or not jnp.issubdtype(leaf.dtype, np.inexact):
            continue
        largest = max(abs(float(np.max(leaf))), abs(float(np.min(leaf))))
        if _LARGE < largest < np.inf:
            yield (
                f"input {path!r} has values up to {largest:,.6g}, but models train best on values "
                "near 1: scale them, for example (x - x.mean(0)) / x.std(0)"
            )


def _is_at_hand(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) or getattr(leaf, "is_fully_addressable", False)
