"""A small state, folders of its checkpoints, and their files."""

import jax
import jax.numpy as jnp

from flaxfit import TrainState
from flaxfit.checkpoints import CheckpointFileReader, save

SMALL = TrainState(
    step=jnp.int32(0),
    params={"w": jnp.arange(4.0)},
    opt_state=(),
    model_state={},
    key=jax.random.key(0),
)


def small_state(step):
    """One that differs by step."""
    return SMALL.replace(step=jnp.int32(step), params={"w": jnp.arange(4.0) + step})


def read(folder, template=None, **options):
    found = CheckpointFileReader(folder, **options).read(template)
    assert found is not None
    return found


def fill(folder, *steps):
    for step in steps:
        save(folder, small_state(step))


def all_files(step):
    return sorted(path for path in step.rglob("*") if path.is_file())


def data_files(step):
    """The files of a step that hold array content."""
    return [path for path in all_files(step) if path.parent.name == "d"]
