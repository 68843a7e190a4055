"""Pure functions whose Python runs once, however many programs they stand in."""

from collections.abc import Callable
from typing import Any

import jax


def traced_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of arrays, which other traced functions call, traced once for their shapes.

    For the Python of a large model takes seconds, and it stands in what looks at the first batch,
    in the training step, and again in one that takes several steps at once. It is JAX that keeps
    what was traced, by all that a trace depends on: mapped axes, meshes and settings, too. The
    programs are the same as without.

    >>> seen = []
    >>> double = traced_once(lambda x: seen.append(x) or 2 * x)
    >>> jax.jit(double)(1.0), jax.jit(lambda x: double(x) + 1)(3.0), len(seen)
    (Array(2., dtype=float32, weak_type=True), Array(7., dtype=float32, weak_type=True), 1)
    """
    return jax.jit(function, inline=True)
