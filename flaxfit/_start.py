"""The start of a run: a fresh state, a given one, or the one that a reader finds on disk."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxfit._state import TrainState, init_state


class Start(NamedTuple):
    """Where a run begins."""

    state: TrainState
    checkpoint: Any = None
    """The file that a reader found, with `data_state` and `callback_states`; None when fresh."""


def start(
    init: Any,
    task: Any,
    key: Any,
    sample: Callable[[], Any],
    say: Callable[[str], None],
    shardings: Callable[[Any], Any] | None = None,
) -> Start:
    """Finds the state to begin with.

    Args:
      init: a linen-style `init`, a `TrainState`, or a reader: an object with `target` (one of the
        two) and `read(template)`, which returns a checkpoint file or None.
      task: the `TrainTask`.
      key: a random key or seed; None where `init` brings a state along.
      sample: gives the inputs of a batch, if they are needed.
      say: prints a line.
      shardings: gives the place of each array of an abstract state, to make it there.

    Raises:
      ValueError: a fresh start without a key.
      TypeError: `init` is none of the three.
    """
    if isinstance(init, TrainState):
        # A state may have been made by hand, with a Python integer or an int64 as its step.
        return Start(init.replace(step=jnp.asarray(init.step, jnp.int32)))
    if hasattr(init, "init"):
        raise TypeError(f"TrainLoop needs an init function, got {init!r:.60}: pass module.init.")
    streams = ("params", *task.rngs)
    if hasattr(init, "read"):
        # Of a warm start only the shapes are asked for, not the weights.
        target = getattr(init.target, "fresh", init.target)

        def make(k: Any) -> TrainState:
            if isinstance(target, TrainState):
                return target.replace(step=jnp.asarray(target.step, jnp.int32))
            return init_state(target, task.optimizer, k, sample(), collections=streams)

        template = jax.eval_shape(make, jax.random.key(0))
        if shardings is not None:
            template = jax.tree.map(_in_place, template, shardings(template))
        found = init.read(template)
        if found is not None:
            say(f"restored step {int(found.state.step):,} from {found.path}")
            return Start(found.state, found)
        say("no checkpoint found, starting fresh")
        return start(init.target, task, key, sample, say, shardings)
    if not callable(init):
        raise TypeError(
            "TrainLoop needs an init function, a TrainState or a CheckpointFileReader, got "
            f"{type(init).__name__}: {init!r:.60}"
        )
    if key is None:
        raise ValueError(
            "A fresh start needs a random key: TrainLoop(..., rnkey=jax.random.key(0))."
        )
    state = init_state(
        init, task.optimizer, key, sample(), collections=streams, shardings=shardings
    )
    return Start(state)


def _in_place(array: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
