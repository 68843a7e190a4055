"""Checks that a loss or a metric treats the rows of a batch one by one."""

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.data._batch import Batch, n_examples
from flaxfit.step._trial import Pass, try_halves, try_rows, with_other_rows
from flaxfit.tree import Function, PyTree

# Two primes that no other dimension has: comparing rows one by one fails on different numbers.
_NUMBERS = _N_OUTPUTS, _N_TARGETS = 10007, 10009
_N_ROWS = 8
"""The number of examples in a trial."""


def check_by_row(
    owner: str, function: Function, outputs: PyTree, targets: PyTree, advice: str = ""
) -> None:
    """Checks that `function(*outputs, *targets)` does not broadcast outputs against targets.

    Outputs `(n, 1)` and targets `(n,)` make `(n, n)` differences, whose mean only looks like a
    loss. A function that accepts different numbers of outputs and targets is suspect, and is tried
    on values: JAX also accepts an index out of bounds, as in
    `outputs[jnp.arange(len(targets)), targets]`.

    Args:
      owner: the name of the loss or the metric, for the message.
      function: the loss or the metric.
      outputs: arrays, or their shapes and dtypes.
      targets: arrays, from which a few rows are taken.
      advice: a sentence to append to the message.

    Raises:
      ValueError: it broadcasts.
    """
    if not jax.tree.leaves(targets):
        return
    try:
        # A function that requires equal numbers, as it should, fails here.
        jax.eval_shape(function, *_resized(outputs, _N_OUTPUTS), *_resized(targets, _N_TARGETS))
        combines_rows = _combines_rows(function, outputs, targets)
    except Exception:  # Or it depends on the model, and does not run on its own.
        return
    if combines_rows:
        shapes = [[leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (outputs, targets)]
        raise ValueError(
            f"{owner} broadcasts outputs against targets: it compares each output with every "
            f"target. Outputs have shapes {shapes[0]}, targets {shapes[1]}: reshape one of them, "
            f"such as targets[:, None].{advice}"
        )


def check_sums(name: str, measure: Function, outputs: PyTree, targets: PyTree) -> None:
    """Checks that the shapes of a metric's sums do not depend on the batch size.

    It traces `measure(weights, *outputs, *targets)`.
    """

    def shapes_for(n: int) -> PyTree:
        weights = jax.ShapeDtypeStruct((n,), "float32")
        sums = jax.eval_shape(measure, weights, *_resized(outputs, n), *_resized(targets, n))
        return jax.tree.map(lambda leaf: leaf.shape, sums)

    try:
        small, large = map(shapes_for, _NUMBERS)
    except Exception:  # It accepts one batch size only.
        return
    if small != large:
        raise ValueError(
            f"The metric {name!r} returns sums whose shape depends on the batch size, but sums are "
            "added element by element over batches and devices. Return sums, such as counts by "
            "class or by bin. For a value of all outputs at once use a callback that calls predict."
        )


def _combines_rows(function: Function, outputs: PyTree, targets: PyTree) -> bool:
    """Tests whether the value of a row, or a mean or sum of values, depends on other rows."""
    draw = np.random.default_rng(0).uniform  # Between 0 and 1, as logits or probabilities.
    drawn = jax.tree.map(
        lambda x: draw(size=(_N_ROWS, *x.shape[1:])[: x.ndim]).astype(x.dtype), outputs
    )
    rows = np.arange(_N_ROWS)
    picked = jax.tree.map(lambda x: np.asarray(x)[rows % len(x)] if x.ndim else x, targets)

    @jax.jit
    def run(state: PyTree, batch: Batch, seed: int) -> Pass:
        found = function(*batch.inputs, *batch.targets)
        values = found[0] if isinstance(found, tuple) else found
        if jnp.ndim(values):
            return Pass({"values": values})
        return Pass({}, penalty={"mean": values, "sum": values / n_examples(batch)})

    batch = Batch(drawn, picked)
    other = with_other_rows(Batch((), picked), rows >= 0).targets
    other = jax.tree.map(lambda x: x + x.dtype.type(jnp.issubdtype(x.dtype, jnp.inexact)), other)
    both = (jax.tree.leaves(run((), batch._replace(targets=each), 0)) for each in (picked, other))
    if all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*both, strict=True)):
        return False  # It ignores the targets.
    changed = try_halves(run, (), batch)
    return bool(try_rows(run, (), batch) or changed.rows or changed.penalty == "mean sum")


def _resized(tree: PyTree, n: int) -> PyTree:
    """Returns the shapes and dtypes of a tree with `n` rows in each array; scalars stay scalars."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]) if x.shape else (), x.dtype), tree
    )
