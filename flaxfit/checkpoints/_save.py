"""save: one checkpoint, or a bare state, on disk when it returns."""

import os
from collections.abc import Mapping
from pathlib import Path

from flaxfit.checkpoints._writer import CheckpointFileWriter
from flaxfit.display import short_errors
from flaxfit.state import Checkpoint, TrainState
from flaxfit.tree import Json


@short_errors
def save(
    folder: str | os.PathLike[str],
    checkpoint: Checkpoint | TrainState,
    *,
    metrics: Mapping[str, float] | None = None,
    history: Json = None,
    callback_states: Mapping[str, Json] | None = None,
) -> Path:
    """Saves a checkpoint, or a bare state, and waits until it is on disk.

    No other step is removed.

    >>> import tempfile, jax.numpy as jnp, optax
    >>> from flaxfit.step._init_state import init_state
    >>> init = lambda rngs, x: {"params": {"w": jnp.ones(3)}}
    >>> state = init_state(init, optax.adam(0.1), 0, (jnp.ones(3),))
    >>> save(tempfile.mkdtemp(), state).name
    '0'

    Args:
      folder: the folder of the run.
      checkpoint: a `Checkpoint`, or a `TrainState`.
      metrics: metrics to save in addition to the checkpoint's own.
      history: the metrics of the run so far; JSON.
      callback_states: the states of callbacks by their names; JSON.

    Returns:
      The folder of the step.
    """
    if not isinstance(checkpoint, Checkpoint):
        step = int(checkpoint.step)
        checkpoint = Checkpoint(step=step, state=checkpoint, metrics=metrics or {})
    elif metrics is not None:
        checkpoint = checkpoint.with_metrics(metrics)
    with CheckpointFileWriter(folder, keep=None, asynchronous=False) as writer:
        writer._found = []  # This does not start a run, so later steps stay.
        return writer.save(checkpoint, history=history, callback_states=callback_states)
