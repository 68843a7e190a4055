"""Checks that a loss or a metric compares each output with its own target, row by row."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Literal

# Two sizes that no other dimension has: rows that are compared one by one must agree in number.
_N_OUTPUTS, _N_TARGETS = 10007, 10009


def check_by_row(
    owner: str, function: Callable[..., Any], outputs: Any, targets: Any, advice: str = ""
) -> None:
    """Checks that a function would not take other numbers of outputs than of targets.

    One that does broadcasts them against one another: outputs `(n, 1)` and targets `(n,)` make
    `(n, n)` differences, whose mean looks like a loss and is none.

    >>> shapes = [jax.ShapeDtypeStruct((8, 1), "float32")], [jax.ShapeDtypeStruct((8,), "float32")]
    >>> check_by_row("The loss", lambda o, t: ((o - t) ** 2).mean(-1), *shapes)
    Traceback (most recent call last):
    ValueError: The loss broadcasts outputs against targets: it compares each output with every ...

    Args:
      owner: what the function is, for the error.
      function: `(*outputs, *targets)`; it is traced.
      outputs: a tuple of trees of arrays or of their shapes and dtypes.
      targets: likewise.
      advice: what else to do where that is meant.

    Raises:
      ValueError: outputs and targets are broadcast.
    """
    if not jax.tree.leaves(targets) or not _takes_any_number(function, outputs, targets):
        return
    shapes = [[leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (outputs, targets)]
    raise ValueError(
        f"{owner} broadcasts outputs against targets: it compares each output with every target. "
        f"Outputs have shapes {shapes[0]}, targets {shapes[1]}: reshape one of them, such as "
        f"targets[:, None].{advice}"
    )


def _takes_any_number(function: Callable[..., Any], outputs: Any, targets: Any) -> bool:
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


def _resized(tree: Any, n: int) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype), tree)
