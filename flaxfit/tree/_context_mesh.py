"""Suspends a caller's mesh and transfer guard: strategies place arrays explicitly."""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

_NO_MESH = Mesh(np.empty((), object), ())
_GUARDS = [
    f"jax_transfer_guard_{way}" for way in ("host_to_device", "device_to_device", "device_to_host")
]


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Runs a `with` block, or a function that it decorates, as if no mesh were set.

    `jax.transfer_guard` does not apply either: putting each batch on its devices explicitly would
    take as long as a small step.

    >>> with jax.set_mesh(jax.make_mesh((1,), ("data",))), without_mesh():
    ...     jax.sharding.get_abstract_mesh().empty
    True
    """
    with contextlib.ExitStack() as contexts:
        # Only if one is set: programs are cached by mesh, and an empty mesh differs from none.
        if not jax.sharding.get_abstract_mesh().empty:
            contexts.enter_context(jax.set_mesh(_NO_MESH))
        if any(getattr(jax.config, name) for name in _GUARDS):  # Setting it takes 30 us.
            contexts.enter_context(jax.transfer_guard("allow"))
        yield
