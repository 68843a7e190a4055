"""Checks that a loss or a metric treats the rows of a batch one by one."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import Literal

from flaxfit._jaxpr import parts_of

# Two sizes that no other dimension has: rows that are compared one by one must agree in number.
_N_OUTPUTS, _N_TARGETS = 10007, 10009
# Primes, to recognise the axis of rows by its size; small, as a loss may make an n x n array.
_N_ROWS = (1009, 1013, 1019, 1021)
# Primitives that combine or move the elements along an axis, and the parameter that names it.
_ALONG_AXIS = {
    "cumsum": "axis",
    "cumprod": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumlogsumexp": "axis",
    "sort": "dimension",
    "rev": "dimensions",
}


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


def couples_rows(function: Callable[..., Any], outputs: Any, targets: Any) -> bool:
    """Whether a value by row depends on other rows, by the program of the function.

    The batch axis is recognised by its size, a prime. A program couples rows where it reduces or
    sorts along that axis, or pairs it with itself. A scalar does so by its nature.

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
    n = next(n for n in _N_ROWS if not any(size and size % n == 0 for size in sizes))

    def values(*arguments: Any) -> Any:
        result = function(*arguments)
        return result[0] if isinstance(result, tuple) else result

    try:
        program = jax.make_jaxpr(values)(*_resized(outputs, n), *_resized(targets, n)).jaxpr
    except Exception:  # It insists on the size of its batch; to divide that fails by itself.
        return False
    return _mixes(program, n)


def check_sums(name: str, measure: Callable[..., Any], outputs: Any, targets: Any) -> None:
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
    except Exception:  # It insists on the size of its batch.
        return
    if small != large:
        raise ValueError(
            f"The metric {name!r} measures arrays whose shape depends on the size of the batch, "
            "and these are added over batches and devices, element by element. Return sums, such "
            "as counts by class or by bin. For a value of all outputs at once use a callback that "
            "calls predict."
        )


def _shapes_of_sums(measure: Callable[..., Any], outputs: Any, targets: Any, n: int) -> Any:
    weights = jax.ShapeDtypeStruct((n,), "float32")
    arguments = (*_resized(outputs, n), *_resized(targets, n))
    sums = jax.eval_shape(measure, weights, *arguments)
    return jax.tree.map(lambda leaf: leaf.shape, sums)


def _mixes(program: Any, n: int) -> bool:
    """Whether what a jaxpr returns was made by combining rows along an axis of size `n`."""
    needed = {v for v in program.outvars if not isinstance(v, Literal)}
    for equation in reversed(program.eqns):
        if needed.isdisjoint(equation.outvars):
            continue
        needed |= {v for v in equation.invars if not isinstance(v, Literal)}
        if any(_axes(v, n) for v in equation.invars) and _mixes_rows(equation, n):
            return True
    return False


def _mixes_rows(equation: Any, n: int) -> bool:
    """Whether an equation of a jaxpr on arrays with an axis of rows combines these."""
    if any(len(_axes(v, n)) != 1 for v in equation.outvars):
        return True
    axis = equation.params.get(_ALONG_AXIS.get(equation.primitive.name, ""), ())
    axes = axis if isinstance(axis, tuple) else (axis,)
    if any(axis in _axes(v, n) for v in equation.invars for axis in axes):
        return True
    return any(_mixes(inner, n) for inner in _inner_programs(equation))


def _inner_programs(equation: Any) -> Iterator[Any]:
    """The programs in an equation, but for the condition of a loop: it only ends the loop."""
    condition = equation.params.get("cond_jaxpr")
    for inner in parts_of(equation):
        if inner is not condition:
            yield getattr(inner, "jaxpr", inner)


def _axes(variable: Any, n: int) -> list[int]:
    """The axes of rows of a variable; several rows may be joined in one axis."""
    shape = getattr(variable.aval, "shape", ())
    return [axis for axis, size in enumerate(shape) if size and size % n == 0]


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
    """The shapes of a tree of arrays, with `n` rows; scalars are left as they are."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]) if x.shape else (), x.dtype), tree
    )
