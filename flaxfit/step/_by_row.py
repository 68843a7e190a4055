"""Checks that a loss or a metric treats the rows of a batch one by one."""

from typing import Any

import jax
from jax.extend.core import Literal

from flaxfit.step._row_coupling import mixes_rows, numbers
from flaxfit.tree._types import Function, PyTree

# Two sizes that no other dimension has: rows that are compared one by one must agree in number.
_N_OUTPUTS, _N_TARGETS = 10007, 10009
# Primes, to recognise the axis of rows by its size; small, as a loss may make an n x n array.
_N_ROWS = (1009, 1013, 1019, 1021)


def check_by_row(
    owner: str, function: Function, outputs: PyTree, targets: PyTree, advice: str = ""
) -> None:
    """Checks that a function would not take other numbers of outputs than of targets.

    One that does broadcasts them against one another: outputs `(n, 1)` and targets `(n,)` make
    `(n, n)` differences, whose mean looks like a loss and is none.

    >>> shapes = [jax.ShapeDtypeStruct((8, 1), "float32")], [jax.ShapeDtypeStruct((8,), "float32")]
    >>> check_by_row("The loss", lambda o, t: ((o - t) ** 2).mean(-1), *shapes)
    Traceback (most recent call last):
    ValueError: The loss broadcasts outputs against targets: it compares each output with every ...

    Args:
      owner: the name of the function in an error.
      function: `(*outputs, *targets)`; it is traced.
      outputs: a tuple of trees of arrays or of their shapes and dtypes.
      targets: a tuple like `outputs`.
      advice: what else the user can do where the coupling is meant.

    Raises:
      ValueError: outputs and targets are broadcast.
    """
    if jax.tree.leaves(targets) and _takes_any_number(function, outputs, targets):
        shapes = [[leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (outputs, targets)]
        raise ValueError(
            f"{owner} broadcasts outputs against targets: it compares each output with every "
            f"target. Outputs have shapes {shapes[0]}, targets {shapes[1]}: reshape one of them, "
            f"such as targets[:, None].{advice}"
        )


def couples_rows(function: Function, outputs: PyTree, targets: PyTree) -> bool:
    """Whether a value by row depends on other rows, or on their number, by the function's program.

    The batch axis is recognised by its size, a prime. A program couples rows where it reduces,
    sorts or reorders along that axis, or pairs it with itself; a scalar does so by its nature. One
    with other numbers for another size, such as a divisor, depends on that.

    >>> rows = jax.ShapeDtypeStruct((8, 3), "float32")
    >>> couples_rows(lambda o, t: ((o - t) ** 2).mean(-1), [rows], [rows])
    False
    >>> couples_rows(lambda o, t: (o @ t.T).sum(-1), [rows], [rows])
    True

    Args:
      function: `(*outputs, *targets)`, whose values (of a pair, the first) have the shape
        `(batch, ...)`; it is traced.
      outputs: a tuple of trees of arrays or of their shapes and dtypes.
      targets: a tuple like `outputs`.
    """
    if jax.config.jax_disable_jit:  # In the debug mode the user's code is not traced.
        return False
    sizes = {size for leaf in jax.tree.leaves((outputs, targets)) for size in leaf.shape}
    fit = [n for n in _N_ROWS if not any(size and size % n == 0 for size in sizes)]

    def values(*arguments: PyTree) -> PyTree:
        result = function(*arguments)
        return result[0] if isinstance(result, tuple) else result

    def program(n: int) -> Any:
        return jax.make_jaxpr(values)(*_resized(outputs, n), *_resized(targets, n))

    try:
        one, other = (program(n) for n in (*fit, *_N_ROWS)[:2])
    except Exception:  # It takes one batch size only; dividing a batch then fails by itself.
        return False
    return mixes_rows(one, (*fit, *_N_ROWS)[0]) or numbers(one) != numbers(other)


def check_sums(name: str, measure: Function, outputs: PyTree, targets: PyTree) -> None:
    """Checks that the sums of a metric have the same shapes whatever the size of the batch.

    Args:
      name: of the metric, for the error.
      measure: `(weights, *outputs, *targets) -> sums`; it is traced.
      outputs: a tuple of trees of arrays or of their shapes and dtypes.
      targets: a tuple like `outputs`.

    Raises:
      ValueError: a shape depends on the batch, so that the sums of batches cannot be added.
    """
    try:
        small, large = (_shapes_of_sums(measure, outputs, targets, n) for n in _N_ROWS[:2])
    except Exception:  # It takes one batch size only.
        return
    if small != large:
        raise ValueError(
            f"The metric {name!r} measures arrays whose shape depends on the size of the batch, "
            "and these are added over batches and devices, element by element. Return sums, such "
            "as counts by class or by bin. For a value of all outputs at once use a callback that "
            "calls predict."
        )


def _shapes_of_sums(measure: Function, outputs: PyTree, targets: PyTree, n: int) -> Any:
    weights = jax.ShapeDtypeStruct((n,), "float32")
    arguments = (*_resized(outputs, n), *_resized(targets, n))
    sums = jax.eval_shape(measure, weights, *arguments)
    return jax.tree.map(lambda leaf: leaf.shape, sums)


def _takes_any_number(function: Function, outputs: PyTree, targets: PyTree) -> bool:
    outputs, targets = _resized(outputs, _N_OUTPUTS), _resized(targets, _N_TARGETS)
    try:
        program = jax.make_jaxpr(function)(*outputs, *targets).jaxpr
    except Exception:  # Whatever it raises: it does not take them, as it should be.
        return False
    used = {v for eqn in program.eqns for v in eqn.invars if not isinstance(v, Literal)}
    used |= {v for v in program.outvars if not isinstance(v, Literal)}
    n_outputs = len(jax.tree.leaves(outputs))
    both = program.invars[:n_outputs], program.invars[n_outputs:]
    # One that looks at the outputs alone, or the targets, compares nothing.
    return all(any(v in used for v in variables) for variables in both)


def _resized(tree: PyTree, n: int) -> Any:
    """The shapes of a tree of arrays, with `n` rows; scalars are left as they are."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]) if x.shape else (), x.dtype), tree
    )
