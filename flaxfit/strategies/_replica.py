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


def unmapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function where there is no such axis: a model that names it is told so.

    >>> int(unmapped(lambda x: x + 1)(3))
    4

    Raises:
      ValueError: the function reduces over the axis.
    """

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except NameError as error:
            if f"unbound axis name: {REPLICA}" not in str(error):
                raise
            raise ValueError(
                f'Cannot reduce over the axis "{REPLICA}" inside the model with virtual_replicas: '
                "a device works at its replicas one after the other. Leave the axis out, as in "
                "nn.BatchNorm(), whose statistics are then those of each replica's examples; or "
                "train without virtual_replicas."
            ) from error

    return call
