"""Detects probable mistakes in the shapes and values of a first batch."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxfit import losses
from flaxfit.data._batch import Batch
from flaxfit.task import EvalTask, TrainTask
from flaxfit.tree import Params, PyTree, flat

_LARGE = 1000
_MOST_CHANNELS = 4  # Of images; more are the features of an earlier layer.
_REGRESSIONS = (losses.mse, losses.mae, losses.huber, losses.log_cosh)
_REGRESSIONS += (optax.l2_loss, optax.squared_error, optax.huber_loss, optax.log_cosh)
_CLASSIFICATIONS = ("accuracy", "binary_accuracy", "precision", "recall", "f1", "auc")


def hints_of(params: Params, batch: Batch, data: Batch, *, convolves: bool) -> Iterator[str]:
    """Yields descriptions of probable mistakes; indices are checked in all data."""
    yield from _of_indices(params, data.inputs)
    yield from _of_images(params, batch.inputs) if convolves else ()
    yield from _of_scales(batch.inputs)


def _of_indices(params: Params, inputs: PyTree) -> Iterator[str]:
    """Yields inputs with indices outside of the largest embedding."""
    tables = [x for path, x in flat(params).items() if path.split("/")[-1] == "embedding"]
    n_rows = max((x.shape[-2] for x in tables if x.ndim > 1), default=0)
    for path, lowest, highest in _ranges(inputs, jnp.integer) if n_rows else ():
        if lowest < 0 or highest >= n_rows:
            advice = f"returns NaN for other indices. Give it {highest + 1:,} rows, or map"
            if -n_rows <= lowest and highest < n_rows:
                advice = "counts those below 0 from its end. Give missing values a row: map"
            yield (
                f"the indices in input {path!r} go from {lowest:,} to {highest:,}, but the largest "
                f"embedding of the model has {n_rows:,} rows and, unless the model maps them, "
                f"{advice} the indices"
            )


def _of_images(params: Params, inputs: PyTree) -> Iterator[str]:
    """Yields batches of images whose last axis a convolution takes for channels."""
    n_channels = {x.shape[2] for x in jax.tree.leaves(params) if x.ndim == 4}
    # A model whose convolutions take few channels may add the channel axis itself.
    is_added = min(n_channels, default=0) <= _MOST_CHANNELS
    for x in () if is_added else jax.tree.leaves(inputs):
        if x.ndim == 3 and x.shape[0] > 1 and x.shape[2] in n_channels:
            yield (
                f"a convolution treats the batch of {x.shape[0]:,} examples as one image and mixes "
                "them: its inputs have no channel axis. Add one, x[..., None]"
            )


def _of_scales(inputs: PyTree) -> Iterator[str]:
    """Yields inputs with values above 1000."""
    for path, lowest, highest in _ranges(inputs, jnp.inexact):
        if _LARGE < (largest := max(abs(float(highest)), abs(float(lowest)))) < np.inf:
            yield (
                f"input {path!r} has values up to {largest:,.6g}, but models train best on values "
                "near 1: scale them, for example (x - x.mean(0)) / x.std(0)"
            )


def _ranges(inputs: PyTree, kind: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields path, minimum and maximum of arrays of a dtype kind; uint8 (images) is skipped."""
    for path, x in flat(inputs).items():
        is_here = isinstance(x, np.ndarray) or getattr(x, "is_fully_addressable", False)
        if is_here and x.size and jnp.issubdtype(x.dtype, kind) and x.dtype != np.uint8:
            yield path, np.min(x), np.max(x)


def check_classes(task: TrainTask | EvalTask, batch: Batch) -> None:
    """Checks that no classification metric is used with the targets of a regression.

    Fractional targets may be soft labels, but not with a regression loss.
    """
    found = [n for n, m in task.metrics.items() if m.configure and m.name in _CLASSIFICATIONS]
    targets = jax.tree.leaves(batch.targets)
    if not found or len(targets) != 1 or not any(task.loss is each for each in _REGRESSIONS):
        return
    # NaN, allowed in examples of weight 0, compares as False below.
    values = np.atleast_1d(np.asarray(targets[0], np.float32))
    values = values.reshape(len(values), -1)
    if values.shape[1] > 1 or not (wrong := values % 1 > 0).any():
        return
    raise ValueError(
        f"The metric {found[0]!r} compares classes, but the targets are numbers such as "
        f"{values[wrong][0]:g}: for a regression use 'mae', 'rmse' or 'r2'."
    )
