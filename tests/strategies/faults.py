"""What `test_process_faults` runs: a job of two processes, the second of which comes to harm.

Each attempt has a fault of its own, the last one none. That one then trains an unharmed run, too.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import optax

import flaxfit as ff

N_STEPS = 60


def main(folder, *faults):
    """Trains a run, perhaps with a fault; and after the last attempt another one, without."""
    attempt = int(os.environ["FLAXFIT_ATTEMPT"])
    fault = faults[attempt] if attempt < len(faults) else None
    heartbeat = 10 if fault == "stopped" else 60
    ff.initialize(heartbeat_seconds=heartbeat, shutdown_seconds=20, patience_seconds=5)
    if attempt and ff.is_main():
        (folder / f"restarted-{attempt}").write_text(str(time.time()))
    params = train(folder, folder / "run", attempt, fault)
    unharmed = train(folder, folder / "unharmed", attempt, None)
    np.savez(folder / f"params-{ff.process_index()}.npz", resumed=params, unharmed=unharmed)


def train(folder, run, attempt, fault):
    """The parameters after sixty steps; a fault comes at the first checkpoint from step 5 on."""
    is_harmed = fault is not None and ff.process_index() == 1

    def harm(checkpoint):
        if not is_harmed or checkpoint.step < 5:
            return
        (folder / f"harmed-{attempt}").write_text(str(time.time()))
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "raising":
            raise ArithmeticError("the harm of a step")
        elif fault == "told to end":
            os.kill(os.getpid(), signal.SIGTERM)
        elif fault == "hanging when told":
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait()

    # When told to end, the processes first agree on a last step, which is some steps later.
    n_batches = 5 if is_harmed and fault == "out of data" else N_STEPS
    rows = np.random.default_rng(ff.process_index())
    batches = [(rows.normal(size=(4, 3)).astype(np.float32),) * 2 for _ in range(n_batches)]
    grace = 2 if fault == "hanging when told" else 60
    save = ff.checkpoints.CheckpointFileWriter(run)
    task = ff.TrainTask(
        lambda v, x, **_: (x * v["params"], {}),
        optax.adam(0.1),
        "mse",
        # As a loader that does not know its length, and ends too early for once.
        ff.data.as_stream(lambda: batches, shared=False),
    )
    loop = ff.TrainLoop(
        ff.checkpoints.CheckpointFileReader(run, init),
        task,
        0,
        n_steps_per_checkpoint=2,
        callbacks=[ff.callbacks.SaveOnSignal(grace_seconds=grace), save, harm],
    )
    for _ in loop:
        pass
    return loop.state.params


def init(rngs, x):
    """Three parameters."""
    return {"params": np.zeros(3, np.float32)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
