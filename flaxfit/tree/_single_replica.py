"""A function as the only replica of a mapped axis, where nothing is mapped."""

import re
from typing import Any

import jax

from flaxfit.tree._types import Function, PyTree


def alone(function: Function, axis: str) -> Function:
    """The function as the only replica: it may name the axis, whose index is 0 and size 1.

    >>> int(alone(lambda x: jax.lax.psum(x, "rows") + jax.lax.axis_index("rows"), "rows")(3))
    3
    """
    # Results that were gathered over the axis are mapped in the eyes of JAX, which refuses to
    # return them without it.
    mapped = jax.vmap(function, in_axes=None, out_axes=0, axis_name=axis, axis_size=1)

    def call(*arguments: PyTree) -> Any:
        return jax.tree.map(lambda x: jax.lax.squeeze(x, (0,)), mapped(*arguments))

    return call


def alone_in_any(function: Function) -> Function:
    """The function as the only replica of every axis that it names.

    Parameters are made, and models exported, by one replica, whatever the strategy calls its axis.

    >>> int(alone_in_any(lambda x: jax.lax.psum(x, "batch"))(3))
    3
    """

    def call(*arguments: PyTree, **options: Any) -> Any:
        def given(*arguments: PyTree) -> Any:
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
    """Returns the axis that JAX could not find, or None for any other error.

    >>> unbound_axis(NameError("unbound axis name: batch")), unbound_axis(NameError("x"))
    ('batch', None)
    """
    found = re.search(r"unbound axis name: (.+?)(?:\. To fix|$)", str(error))
    return found and found[1]
