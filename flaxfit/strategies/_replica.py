"""The axis of replicas, which a model may reduce over, such as `BatchNorm(axis_name="replica")`."""

from collections.abc import Callable
from typing import Any

import jax

REPLICA = "replica"


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as the only replica: it may name the axis where nothing is mapped.

    >>> int(alone(lambda x: jax.lax.psum(x, REPLICA))(3))
    3
    """
    return jax.vmap(function, in_axes=None, out_axes=None, axis_name=REPLICA, axis_size=1)
