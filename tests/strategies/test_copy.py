"""Copies of what may be written to while a program still reads it."""

import jax
import numpy as np
import optax
import pytest

import flaxfit as ff
from flaxfit.strategies import DataParallel
from flaxfit.strategies._copy import unaliased


def aligned(shape, offset=0):
    """An array of float32 whose memory begins so many bytes after a multiple of 64."""
    n = 4 * int(np.prod(shape))
    memory = np.empty(n + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    return memory[begin : begin + n].view(np.float32).reshape(shape)


@pytest.mark.parametrize("strategy", [DataParallel, ff.Sharded.fsdp])
def test_a_split_batch_does_not_alias_the_memory_of_its_source(strategy):
    strategy = strategy(devices=jax.devices()[:2])
    program = jax.jit(lambda x: x + 0)
    for array in (aligned((4, 3)), aligned((4, 3), offset=16)):
        array[:] = 1
        for batch in (array, {"x": array}):
            (split,) = jax.tree.leaves(strategy.split(batch))
            on_device = jax.device_put(split)
            array[:] = 2
            np.testing.assert_array_equal(program(on_device), 1)
            array[:] = 1


@pytest.mark.parametrize("strategy", [DataParallel, ff.Sharded.fsdp])
def test_a_large_array_may_be_changed_once_it_is_placed(strategy):
    array = aligned((4_000_000,))
    for _ in range(3):
        array[:] = 1
        placed = strategy(devices=jax.devices()[:4]).place({"x": array})
        array[:] = 2
        np.testing.assert_array_equal(placed["x"], 1)


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0, 4, 16])
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_source_may_write_each_batch_into_the_memory_of_the_one_before(steps_per_call, offset):
    # Large, since some versions of JAX copy large arrays after a call has returned.
    batches = np.random.default_rng(0).normal(size=(16, 2**16, 8)).astype(np.float32)

    def reusing():
        x, y = aligned((2**16, 8), offset), aligned((2**16, 1), offset)
        for batch in batches:
            x[:], y[:] = batch, batch.sum(1, keepdims=True)
            yield x, y

    def last_loss(data):
        task = ff.TrainTask(lambda v, x, **_: (x @ v["params"], {}), optax.sgd(0.01), "mse", data)
        init = ff.TrainState.create(task.optimizer, {"params": np.zeros((8, 1), np.float32)})
        options = {"n_steps_per_checkpoint": 16, "first_checkpoint": 16, "stdout": False}
        options |= {"devices": jax.devices()[:1], "steps_per_call": steps_per_call}
        (checkpoint,) = ff.TrainLoop(init, task, **options)
        return checkpoint.loss

    assert last_loss(reusing()) == last_loss([(x, x.sum(1, keepdims=True)) for x in batches])


def test_memory_that_a_source_may_write_to_is_copied():
    x = aligned(8)
    assert unaliased(x) is not x
    x.flags.writeable = False
    assert unaliased(x) is x
