"""What `test_process_faults` runs: two processes that leave a loop, and end."""

import sys

import numpy as np
import optax

import flaxfit as ff
from flaxfit.callbacks import _signal


def main(folder):
    """Takes one step of several, while the thread that hears of preemptions asks all the time."""
    _signal._SECONDS_BETWEEN_LOOKS = 0.0
    ff.initialize()
    x = np.ones((32, 3), np.float32)
    data = ff.ArrayStream(x, x, batch_size=8)
    task = ff.TrainTask(lambda v, x, **_: (x * v["params"], {}), optax.adam(0.1), "mse", data)
    loop = ff.TrainLoop(
        lambda rngs, x: {"params": np.zeros(3, np.float32)},
        task,
        0,
        callbacks=[ff.callbacks.SaveOnSignal(), ff.checkpoints.CheckpointFileWriter(folder)],
    )
    next(loop)


if __name__ == "__main__":
    main(sys.argv[1])
