"""Runs a function as the only replica of the axes that it names, without a map over devices."""

import functools
import re

import jax

from flaxfit.tree._types import Function, PyTree


def single_replica(function: Function, axis: str) -> Function:
    """Makes a function the only replica of an axis, with index 0 and size 1.

    >>> int(single_replica(lambda x: jax.lax.psum(x, "rows"), "rows")(3))
    3
    """
    # out_axes=0: JAX treats gathered results as mapped, and cannot return them with None.
    mapped = jax.vmap(function, in_axes=None, out_axes=0, axis_name=axis, axis_size=1)

    def call(*arguments: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jax.lax.squeeze(x, (0,)), mapped(*arguments))

    return call


def single_replica_of_any_axis(function: Function) -> Function:
    """Makes a function the only replica of every axis that it names.

    One replica initializes parameters and exports models, whatever the strategy calls its axis.

    >>> int(single_replica_of_any_axis(lambda x: jax.lax.psum(x, "batch"))(3))
    3
    """

    def call(*arguments: PyTree, **options: PyTree) -> PyTree:
        bound, axes = functools.partial(function, **options), set()
        while True:  # An error of JAX names one unbound axis: bind it and try again.
            try:
                return bound(*arguments)
            except NameError as error:
                axis = unbound_axis(error)
                if axis is None or axis in axes:
                    raise
                axes.add(axis)
                bound = single_replica(bound, axis)

    return call


def unbound_axis(error: NameError) -> str | None:
    """Returns the name of the axis that JAX could not find, or None for any other error."""
    found = re.search(r"unbound axis name: (.+?)(?:\. To fix|$)", str(error))
    return found and found[1]
