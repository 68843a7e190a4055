"""gather: whole host arrays from arrays spread over devices and processes."""

import jax
import numpy as np
from jax.experimental import multihost_utils

from flaxfit.tree import ArrayLike, PyTree, is_key


def gather(tree: PyTree) -> PyTree:
    """Gathers a tree of arrays that are spread over devices into NumPy arrays on the host.

    With several processes, all must call it, and each receives all arrays. Moves one array at a
    time. Random keys stay keys.

    >>> gather({"w": jax.numpy.ones(2)})
    {'w': array([1., 1.], dtype=float32)}
    """
    return jax.tree.map(_whole, tree)


def _whole(x: ArrayLike) -> ArrayLike:
    if not isinstance(x, jax.Array):
        return x
    if is_key(x):
        return jax.random.wrap_key_data(_whole(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    if x.is_fully_addressable:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)
