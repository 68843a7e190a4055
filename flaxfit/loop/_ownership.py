"""Copies of arrays that the next step donates, for checkpoints that own their arrays."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np

from flaxfit.strategies import Strategy
from flaxfit.tree import PyTree

Copier: TypeAlias = Callable[[PyTree], Any]
"""A function that copies a tree of placed arrays."""


def copier(where: str, strategy: Strategy) -> Copier | None:
    """Returns the function that copies a tree of placed arrays; None for "none".

    >>> from flaxfit import DataParallel
    >>> type(copier("host", DataParallel())({"w": jax.numpy.ones(2)})["w"]).__name__
    'ndarray'

    Args:
      where: "device"; "host", as whole NumPy arrays (of random keys, their data); or "none".
      strategy: the strategy that placed the arrays.

    Raises:
      ValueError: `where` is none of these, or is "host" with several processes.
    """
    if where not in ("device", "host", "none"):
        raise ValueError(f'snapshot must be "device", "host" or "none", got {where!r}.')
    if where == "host" and strategy.n_processes > 1:
        raise ValueError(
            'snapshot="host" needs all arrays in one process, but these are spread over '
            f'{strategy.n_processes}: use "device", and flaxfit.gather where whole arrays are '
            "needed."
        )
    if where == "none":
        return None
    # Not `np.asarray`: on a CPU it may alias the buffer that the next step writes to.
    return strategy.collect if where == "device" else lambda tree: jax.tree.map(np.array, tree)
