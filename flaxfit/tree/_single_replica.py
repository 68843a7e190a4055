"""Runs a function as the only replica of the axes that it names, although nothing is mapped."""

import re

import jax

from flaxfit.tree._types import Function, PyTree


def alone(function: Function, axis: str) -> Function:
    """Makes a function the only replica of an axis, with index 0 and size 1.

    >>> int(alone(lambda x: jax.lax.psum(x, "rows") + jax.lax.axis_index("rows"), "rows")(3))
    3
    """
    # Gathered results count as mapped over the axis, and JAX refuses to return them unmapped.
    mapped = jax.vmap(function, in_axes=None, out_axes=0, axis_name=axis, axis_size=1)

    def call(*arguments: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jax.lax.squeeze(x, (0,)), mapped(*arguments))

    return call


def alone_in_any(function: Function) -> Function:
    """Makes a function the only replica of every axis that it names.

    One replica initializes parameters and exports models, whatever the strategy calls its axis.

    >>> int(alone_in_any(lambda x: jax.lax.psum(x, "batch"))(3))
    3
    """

    def call(*arguments: PyTree, **options: PyTree) -> PyTree:
        def given(*arguments: PyTree) -> PyTree:
            return function(*arguments, **options)

        axes: list[str] = []
        while True:
            bound = given
            for axis in axes:
                bound = alone(bound, axis)
            try:
                return bound(*arguments)
            except NameError as error:
                axis = unbound_axis(error)
                if axis is None or axis in axes:
                    raise
                axes.append(axis)

    return call


def unbound_axis(error: NameError) -> str | None:
    """Returns the name of the axis that JAX could not find, or None for any other error."""
    found = re.search(r"unbound axis name: (.+?)(?:\. To fix|$)", str(error))
    return found and found[1]
