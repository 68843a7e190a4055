"""States to save, folders of their checkpoints, and the files in these."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxfit import Checkpoint, TrainState
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter, _seal, list_steps, save

SMALL = TrainState(
    step=jnp.int32(0),
    params={"w": jnp.arange(4.0)},
    opt_state=(),
    model_state={},
    key=jax.random.key(0),
)
ADAMW = optax.adamw(optax.linear_schedule(1e-2, 0.0, 100))


def small_state(step):
    """One of few arrays, which are saved in half the time; it differs by step."""
    return SMALL.replace(step=jnp.int32(step), params={"w": jnp.arange(4.0) + step})


def numbers(*shape, dtype=jnp.float32):
    return jnp.asarray(np.sin(np.arange(np.prod(shape))).reshape(shape), dtype)


def make_state(step=0, width=5, optimizer=ADAMW):
    """One like that of a trained model, of two dtypes; its own for every step."""
    params = {
        "BatchNorm_0": {"scale": numbers(width), "bias": numbers(width)},
        "Dense_0": {
            "kernel": numbers(3, width, dtype=jnp.bfloat16),
            "bias": numbers(width, dtype=jnp.bfloat16),
        },
        "Dense_1": {"kernel": numbers(width, 2), "bias": numbers(2)},
    }
    statistics = {"BatchNorm_0": {"mean": numbers(width), "var": numbers(width)}}
    variables = {
        "params": jax.tree.map(lambda x: x + np.asarray(step, x.dtype), params),
        "batch_stats": statistics,
        "counts": {"calls": jnp.int32(2)},
    }
    state = TrainState.create(optimizer, variables, key=step).replace_step(step)
    return state.replace(opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))


def make_checkpoint(step=0, **metrics):
    metrics = metrics or {"loss": 1 / (1 + step)}
    return Checkpoint(step=step, state=small_state(step), metrics=metrics)


def replicated(tree):
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def abstract(state):
    return jax.eval_shape(lambda: state)


def read(folder, template=None, **options):
    found = CheckpointFileReader(folder, **options).read(template)
    assert found is not None
    return found


def fill(folder, *steps):
    for step in steps:
        save(folder, small_state(step))


def save_losses(folder, losses, first=1, **options):
    """Saves a checkpoint for each value of `val_loss`; returns the steps that are kept."""
    with CheckpointFileWriter(folder, **options) as writer:
        for step, loss in enumerate(losses, start=first):
            writer(make_checkpoint(step, val_loss=loss))
    return list_steps(folder)


def rewrite_record(step, change):
    """Lets a function change the record of a step, and seals the step again."""
    file = step / "record" / "metadata"
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))
    _seal.write(step)


def all_files(step):
    return sorted(path for path in step.rglob("*") if path.is_file())


def data_files(step):
    """The files of a step that hold array content."""
    return [path for path in all_files(step) if path.parent.name == "d"]
