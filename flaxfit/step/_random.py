"""The random keys of a step: pure functions of its number, not a carried state."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from flaxfit.tree import ArrayLike, PyTree, Rngs

# Offset of evaluation positions: parts of a training step fold in numbers from 0.
_EVALUATION = 2**31


def step_key(key: jax.Array, step: ArrayLike, replica: ArrayLike = 0) -> jax.Array:
    """Derives the random key of a step on a replica, `fold_in(fold_in(key, step), replica)`.

    Stream `i` of a task's `rngs` receives `fold_in(step_key(...), i)`.

    >>> step_key(jax.random.key(0), step=3, replica=1).shape
    ()
    """
    return jax.random.fold_in(jax.random.fold_in(key, step), replica)


def eval_key(state: PyTree, position: ArrayLike, replica: ArrayLike) -> jax.Array:
    """Derives the random key of a batch in evaluation, distinct from those of training steps."""
    number = jnp.asarray(position, jnp.uint32) + jnp.uint32(_EVALUATION)
    return jax.random.fold_in(step_key(state.key, state.step, replica), number)


def rngs_of(names: Sequence[str], key: jax.Array) -> Rngs:
    """Derives the keys of random streams from the key of a step."""
    return {name: jax.random.fold_in(key, i) for i, name in enumerate(names)}
