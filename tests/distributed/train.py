"""What the tests of engines start: a program that trains, and does not know what starts it."""

import json
import threading
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax

import flaxfit as ff
from flaxfit.distributed import is_preempted

N_STEPS = 48


def main():
    """Trains in the current folder, and leaves weights, losses and what this process is."""
    ff.initialize()
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    model = ff.Model(
        nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(1)]),
        optax.adam(1e-2),
        "mse",
        strategy=ff.DataParallel(virtual_replicas=4),  # The same bits for any number of processes.
    )
    history = model.fit(
        x,
        x.sum(1, keepdims=True),
        batch_size=16,
        epochs=N_STEPS // 4,
        callbacks=[wait_for_the_signal],
        checkpoint_dir="run",
        verbose=2,
    )
    weights = [np.asarray(leaf) for leaf in jax.tree.leaves(ff.gather(model.state.params))]
    Path(f"result-{ff.process_index()}.json").write_text(
        json.dumps(
            {
                "n_processes": ff.process_count(),
                "steps": history.steps,
                "losses": history["loss"],
                "weights": b"".join(leaf.tobytes() for leaf in weights).hex(),
            }
        )
    )


def wait_for_the_signal(checkpoint):
    """Trains on after the second epoch only when a signal has come, if the test is to send one."""
    if checkpoint.step != 8 or not Path("signal-at-8").exists():
        return
    Path("has-reached-8").touch()
    ended = threading.Event()
    for _ in range(600):
        if is_preempted():
            return
        ended.wait(0.1)
    raise TimeoutError("No signal came within 60 s.")


if __name__ == "__main__":
    main()
