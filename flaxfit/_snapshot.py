"""Snapshots: where the copy of a state lies that a checkpoint hands out."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.strategies import Strategy


def snapshots(where: str, strategy: Strategy) -> Callable[[Any], Any]:
    """The function that copies what the next step would use up: a tree of placed arrays.

    >>> from flaxfit import DataParallel
    >>> type(snapshots("host", DataParallel())({"w": jnp.ones(2)})["w"]).__name__
    'ndarray'

    Args:
      where: "device", where a copy takes the least time, or "host", where it takes no memory of
        the devices: whole NumPy arrays, of which random keys alone stay keys.
      strategy: what the arrays were placed by.

    Raises:
      ValueError: there is no such place, or several processes hold the arrays.
    """
    if where not in ("device", "host"):
        raise ValueError(f'snapshot must be "device" or "host", got {where!r}.')
    if where == "device":
        return strategy.collect
    if strategy.n_processes > 1:
        raise ValueError(
            'snapshot="host" needs all arrays in one process, and these are spread over '
            f'{strategy.n_processes}: use "device", and flaxfit.gather where whole arrays are '
            "needed."
        )

    def on_host(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return strategy.collect(x)
        # Not `np.asarray`: on a CPU that may be the very memory that the next step writes to.
        return np.array(x)

    return lambda tree: jax.tree.map(on_host, tree)
