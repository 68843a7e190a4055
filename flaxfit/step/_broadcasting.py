"""Checks that a loss or a metric treats the rows of a batch one by one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, Literal

from flaxfit.step._row_coupling import mixes_rows, numbers, pairs_rows, picks_in_order
from flaxfit.tree._types import Function, PyTree

# Two sizes that no other dimension has: rows that are compared one by one must agree in number.
_NUMBERS = _N_OUTPUTS, _N_TARGETS = 10007, 10009
# Primes, to recognise the axis of rows by its size; small, as a loss may make an n x n array.
_N_ROWS = (1009, 1013, 1019, 1021)


def check_by_row(
    owner: str, function: Function, outputs: PyTree, targets: PyTree, advice: str = ""
) -> None:
    """Checks that `function(*outputs, *targets)` does not take other numbers of either.

    One that does broadcasts them against one another: outputs `(n, 1)` and targets `(n,)` make
    `(n, n)` differences, whose mean only looks like a loss.
    """
    if jax.tree.leaves(targets) and _takes_any_number(function, outputs, targets):
        shapes = [[leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (outputs, targets)]
        raise ValueError(
            f"{owner} broadcasts outputs against targets: it compares each output with every "
            f"target. Outputs have shapes {shapes[0]}, targets {shapes[1]}: reshape one of them, "
            f"such as targets[:, None].{advice}"
        )


def couples_rows(function: Function, outputs: PyTree, targets: PyTree) -> bool:
    """Whether a value of `function(*outputs, *targets)` depends on other rows, or their number.

    The batch axis is recognized by its size, a prime. A program couples rows where it reduces,
    sorts or reorders along that axis, or pairs it with itself; a scalar does so by its nature. One
    with other numbers for another size, such as a divisor, depends on that. Of a pair of results,
    the first is examined. In the debug mode, where nothing is traced, see `couples_values`.
    """
    if jax.config.jax_disable_jit:
        return couples_values(function, outputs, targets)
    shapes = [leaf.shape for leaf in jax.tree.leaves((outputs, targets)) if leaf.shape]
    sizes = {size for shape in shapes for size in shape}
    fit = [n for n in _N_ROWS if not any(size and size % n == 0 for size in sizes)]
    primes = (*fit, *_N_ROWS)[:2]
    # A function that divides its rows, for example into pairs, needs multiples of this batch.
    multiples = [n * shapes[0][0] for n in primes] if shapes else primes

    def program(n: int) -> Jaxpr:
        return jax.make_jaxpr(_first_of(function))(*_resized(outputs, n), *_resized(targets, n))

    for n, another in primes, multiples:
        try:
            one, other = program(n), program(another)
        except Exception:  # It takes other batch sizes only.
            continue
        return mixes_rows(one, n) or numbers(one) != numbers(other)
    return False  # It takes one batch size only; dividing a batch then fails by itself.


def couples_values(function: Function, outputs: PyTree, targets: PyTree) -> bool:
    """As `couples_rows`, by trial: whether a value changes where the last row is left out.

    What is traced, as under a gradient, has no values to compare, and is not examined.
    """
    arguments = outputs, targets
    if any(isinstance(x, Tracer | jax.ShapeDtypeStruct) for x in jax.tree.leaves(arguments)):
        return False
    fewer = jax.tree.map(lambda x: x[:-1] if jnp.ndim(x) else x, arguments)
    values = _first_of(function)
    try:
        whole, rest = (jax.tree.leaves(values(*each[0], *each[1])) for each in (arguments, fewer))
        return any(map(_differs, whole, rest))
    except Exception:  # It takes one batch size only; dividing a batch then fails by itself.
        return False


def _differs(whole: jax.Array, rest: jax.Array) -> bool:
    """Whether an array differs from that without the last row in another row."""
    a, b = (np.asarray(x, np.float64) for x in (whole, rest))
    a = a[:-1] if a.ndim else a
    return a.shape == b.shape and a.size > 0 and not np.allclose(a, b, 1e-3, 1e-6, equal_nan=True)


def _first_of(function: Function) -> Function:
    """A function with the first of its results, where these are a tuple."""

    def first(*arguments: PyTree) -> PyTree:
        result = function(*arguments)
        return result[0] if isinstance(result, tuple) else result

    return first


def check_sums(name: str, measure: Function, outputs: PyTree, targets: PyTree) -> None:
    """Checks that the sums of a metric have the same shapes whatever the size of the batch.

    `measure(weights, *outputs, *targets)` is traced.
    """

    def shapes_for(n: int) -> PyTree:
        weights = jax.ShapeDtypeStruct((n,), "float32")
        sums = jax.eval_shape(measure, weights, *_resized(outputs, n), *_resized(targets, n))
        return jax.tree.map(lambda leaf: leaf.shape, sums)

    try:
        small, large = map(shapes_for, _N_ROWS[:2])
    except Exception:  # It takes one batch size only.
        return
    if small != large:
        raise ValueError(
            f"The metric {name!r} measures arrays whose shape depends on the size of the batch, "
            "and these are added over batches and devices, element by element. Return sums, such "
            "as counts by class or by bin. For a value of all outputs at once use a callback that "
            "calls predict."
        )


def _takes_any_number(function: Function, outputs: PyTree, targets: PyTree) -> bool:
    outputs, targets = _resized(outputs, _N_OUTPUTS), _resized(targets, _N_TARGETS)
    try:
        closed = jax.make_jaxpr(function)(*outputs, *targets)
    except Exception:  # It takes equal numbers only, as it should.
        return False
    # An index beyond the rows is not an error in JAX: outputs[jnp.arange(len(targets)), targets].
    is_in_order = any(picks_in_order(closed, *each) for each in itertools.permutations(_NUMBERS))
    if is_in_order and not pairs_rows(closed, *_NUMBERS):
        return False
    program = closed.jaxpr
    used = {v for eqn in program.eqns for v in eqn.invars if not isinstance(v, Literal)}
    used |= {v for v in program.outvars if not isinstance(v, Literal)}
    n_outputs = len(jax.tree.leaves(outputs))
    both = program.invars[:n_outputs], program.invars[n_outputs:]
    # A function of the outputs alone, or of the targets, compares nothing.
    return all(any(v in used for v in variables) for variables in both)


def _resized(tree: PyTree, n: int) -> PyTree:
    """The shapes and dtypes of a tree of arrays, with `n` rows; scalars have none."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]) if x.shape else (), x.dtype), tree
    )
