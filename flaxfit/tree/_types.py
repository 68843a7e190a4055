"""Names for the types that pass through flaxfit."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

PyTree: TypeAlias = Any
"""A tree of containers registered with JAX; the leaves are usually arrays."""

Array: TypeAlias = jax.Array | np.ndarray
"""An array of JAX or NumPy."""

ArrayLike: TypeAlias = Any
"""An argument of `jnp.asarray`: an array, a number, or nested lists of numbers."""

Device: TypeAlias = Any
"""A device of JAX, which has no public class."""

Json: TypeAlias = Any
"""A value that the `json` module writes and reads."""

Params: TypeAlias = PyTree
"""The parameters of a model."""

Variables: TypeAlias = PyTree
"""The collections of a model by name, `{"params": ..., "batch_stats": ...}`."""

OptState: TypeAlias = PyTree
"""The state of an optimizer."""

Sums: TypeAlias = PyTree
"""The sums of a metric over examples: a tuple of arrays."""

ApplyFn: TypeAlias = Callable[..., tuple[PyTree, PyTree]]
"""`apply(variables, inputs, *, rngs, train, mutable) -> (outputs, changed collections)`."""

InitFn: TypeAlias = Callable[..., Variables]
"""`init(rngs, inputs) -> variables`."""

LossFn: TypeAlias = Callable[..., ArrayLike]
"""`loss(outputs, targets) -> loss of each example`."""

Function: TypeAlias = Callable[..., Any]
"""A function of any arguments and result."""

Data: TypeAlias = Any
"""An argument of `as_stream`: arrays, a loader of another library, or any iterable of batches."""

Rngs: TypeAlias = Any
"""Random keys by the names of their streams."""


class Transformation(Protocol):
    """An Optax transformation, or another object with the same two functions."""

    @property
    def init(self) -> Function:
        """`init(params) -> state`."""
        ...

    @property
    def update(self) -> Function:
        """`update(grads, state, params, **extra) -> (updates, state)`."""
        ...
