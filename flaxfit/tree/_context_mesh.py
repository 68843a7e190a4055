"""Leaves the mesh that a caller has set (`jax.set_mesh`): a strategy has devices of its own."""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

_NO_MESH = Mesh(np.empty((), object), ())


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Runs a `with` block, or a function that it decorates, as if no mesh were set.

    >>> with jax.set_mesh(jax.make_mesh((1,), ("data",))), without_mesh():
    ...     jax.sharding.get_abstract_mesh().empty
    True
    """
    if jax.sharding.get_abstract_mesh().empty:
        yield  # Programs are cached by their mesh, and none is not the same as an empty one.
    else:
        with jax.set_mesh(_NO_MESH):
            yield
