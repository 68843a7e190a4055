"""Inspection of the first batch: what a task makes of it, or in words why it cannot be trained."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax.errors import InvalidRngError

from flaxfit import losses
from flaxfit._batch import Batch, n_examples
from flaxfit._forward import ForwardPass, evaluate_loss, forward, forward_eval
from flaxfit._rules import flat


def inspect(
    task: Any,
    state: Any,
    batch: Batch,
    data: Batch | None = None,
    bind: Callable[..., Any] = lambda function: function,
) -> ForwardPass:
    """Traces one forward pass of a task without running it, on a batch as the user passed it.

    Args:
      task: a `TrainTask`.
      state: the training state.
      batch: the first batch.
      data: all of the data, where it is at hand: its values are checked, else the batch's.
      bind: of the strategy, to trace as it does.

    Returns:
      The shapes and dtypes of a `ForwardPass`.

    Raises:
      ValueError: labels, weights, the shape of the loss or a random stream do not fit.
      TypeError: the batch lacks the targets that the loss wants.
    """
    check_finite(batch if data is None else data, "The first batch" if data is None else "The data")

    def pass_forward(state: Any, batch: Batch) -> ForwardPass:
        return forward(task, state.params, state.model_state, batch, state.key)

    try:
        # Over the state's shapes, since its arrays are spread over the devices of a strategy.
        result = jax.eval_shape(
            bind(pass_forward),
            shapes_of(state),
            shapes_of(batch),
        )
    except InvalidRngError as error:
        raise ValueError(
            "The model asks for a random stream that the task does not supply: "
            f"{error}\nTrainTask(..., rngs={task.rngs}) supplies {list(task.rngs)}: add its name."
        ) from error
    except TypeError as error:
        if not batch.targets and "argument" in str(error):
            shapes = jax.tree.map(lambda x: x.shape, batch.inputs)
            raise TypeError(
                "A batch from 'data' must be (inputs, targets) or a mapping for a loss that wants "
                f"targets, got only inputs of shape {shapes}: {error}. Wrap it: yield x, y."
            ) from error
        raise
    check_loss(task.loss, result.values, result.outputs, batch, data)
    return result


def inspect_eval(
    task: Any,
    state: Any,
    batch: Batch,
    bind: Callable[..., Any] = lambda function: function,
) -> Any:
    """Traces one measurement without running it: the shape of the loss, None without a loss.

    Raises:
      ValueError: labels, weights or the shape of the loss do not fit.
    """

    def measure(state: Any, batch: Batch) -> Any:
        outputs = forward_eval(task, state, batch, state.key if task.rngs else None)
        if task.loss is None:
            return outputs, None
        return outputs, evaluate_loss(task.loss, outputs, batch.targets)[0]

    outputs, values = jax.eval_shape(bind(measure), shapes_of(state), shapes_of(batch))
    if values is not None:
        check_loss(task.loss, values, outputs, batch)
    return values


def check_loss(
    loss: Any, values: Any, outputs: Any, batch: Batch, data: Batch | None = None
) -> None:
    """Checks the shape of a loss against the batch, and the values of labels, on the host."""
    losses.check_loss_shape(values.shape, outputs, batch.targets, n_examples(batch))
    losses.check_values(loss, outputs, (data or batch).targets)
    if values.ndim == 0 and batch.weights is not None:
        raise ValueError(
            "Weights cannot be applied to a loss that returns a scalar: return one value per "
            f"example, of shape ({n_examples(batch)},), without taking the mean."
        )


def check_finite(batch: Batch, name: str) -> None:
    """Checks that no input is NaN or infinite.

    Raises:
      ValueError: with the path of the input, how many of its rows are not finite, and the first.
    """
    for path, leaf in flat(batch.inputs).items():
        if not np.issubdtype(leaf.dtype, np.floating) or bool(np.isfinite(np.sum(leaf))):
            continue
        bad = ~np.isfinite(np.asarray(leaf)).reshape(len(leaf), -1).all(1)
        if bad.any():
            raise ValueError(
                f"{name} holds NaN or infinite values: input {path!r}, {bad.sum():,} of "
                f"{len(leaf):,} rows, the first of them row {bad.argmax():,}. Clean the data, or "
                "replace the values (np.nan_to_num)."
            )


def shapes_of(tree: Any) -> Any:
    """A tree of shapes and dtypes, without the arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
