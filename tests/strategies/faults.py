"""What `test_process_faults` runs: a job of two processes, the second of which comes to harm."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import optax

import flaxfit as ff

FAULTS = ("killed", "stopped", "raising", "out of data", "told to end", "hanging when told")


def main(folder, fault):
    """Trains ten steps; in the first attempt the fault comes at step 5."""
    heartbeat = 10 if fault == "stopped" else 60
    ff.initialize(heartbeat_seconds=heartbeat, shutdown_seconds=20, patience_seconds=5)
    is_first = os.environ["FLAXFIT_ATTEMPT"] == "0"
    is_harmed = is_first and ff.process_index() == 1
    if not is_first and ff.is_main():
        (folder / "restarted").write_text(str(time.time()))

    def harm(checkpoint):
        if not is_harmed or checkpoint.step < 5:
            return
        (folder / "harmed").write_text(str(time.time()))
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "raising":
            raise ArithmeticError("the harm of step 5")
        elif fault == "told to end":
            os.kill(os.getpid(), signal.SIGTERM)
        elif fault == "hanging when told":
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait()

    n_batches = 5 if is_harmed and fault == "out of data" else 10
    if fault == "told to end":
        n_batches = 60  # The processes agree on where to end, which takes them a moment.
    rows = np.random.default_rng(ff.process_index())
    batches = [(rows.normal(size=(4, 3)).astype(np.float32),) * 2 for _ in range(n_batches)]
    grace = 2 if fault == "hanging when told" else 60
    save = ff.checkpoints.CheckpointFileWriter(folder / "run")
    task = ff.TrainTask(
        lambda v, x, **_: (x * v["params"], {}),
        optax.adam(0.1),
        "mse",
        # As a loader that does not know its length, and ends too early for once.
        ff.data.as_stream(lambda: batches, shared=False),
    )
    loop = ff.TrainLoop(
        ff.checkpoints.CheckpointFileReader(folder / "run", init),
        task,
        0,
        n_steps_per_checkpoint=2,
        callbacks=[ff.callbacks.SaveOnSignal(grace_seconds=grace), save, harm],
    )
    for _ in loop:
        pass
    np.save(folder / f"params-{ff.process_index()}.npy", loop.state.params)


def init(rngs, x):
    """Three parameters."""
    return {"params": np.zeros(3, np.float32)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
