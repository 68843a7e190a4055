"""What `test_many_processes` runs in each of several processes; and alone, to compare with."""

import json
import sys
from pathlib import Path

import flaxfit as ff

if __name__ == "__main__":
    ff.initialize(heartbeat_seconds=20, shutdown_seconds=30, patience_seconds=20)

import jax
import numpy as np
import optax
from flax import linen as nn

RNG = np.random.default_rng(0)
X = RNG.normal(size=(53, 16)).astype(np.float32)
Y = RNG.integers(0, 3, 53)
STRATEGIES = {"data_parallel": ff.DataParallel, "fsdp": ff.Sharded.fsdp}


class Net(nn.Module):
    """A kernel large enough to be split."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Dense(512)(x)))


def train(strategy, data, n_steps, folder=None, **options):
    """Trains, measures and perhaps saves; the last checkpoint and the parameters."""
    net = Net()
    init, callbacks = net.init, []
    measured = ff.EvalTask(net.apply, ["accuracy"], (X[:21], Y[:21]), loss="crossentropy")
    callbacks.append(ff.EvalLoop(measured))
    if folder is not None:
        callbacks.append(ff.checkpoints.CheckpointFileWriter(folder))
        init = ff.checkpoints.CheckpointFileReader(folder, net.init)
    task = ff.TrainTask(
        net.apply, optax.adam(0.01), "crossentropy", data, ["accuracy"], rngs=(), **options
    )
    loop = ff.TrainLoop(
        init,
        task,
        0,
        n_steps=n_steps,
        n_steps_per_checkpoint=5,
        strategy=strategy,
        callbacks=callbacks,
        stdout=False,
    )
    metrics = [checkpoint.metrics for checkpoint in loop]
    return loop, metrics


def arrays(**options):
    """The data in an order of its own, with a remainder that divides by nothing."""
    return ff.ArrayStream(X, Y, batch_size=16, shuffle=True, **options)


def own_parts():
    """The same batches as `arrays` gives, brought by each process for itself."""
    stream = arrays(drop_remainder=True)
    size, index = 16 // ff.process_count(), ff.process_index()
    for _ in range(6):
        rows = stream.next_rows()[index * size : (index + 1) * size]
        yield X[rows], Y[rows]


def stop_one(strategy):
    """The steps of the checkpoints of a run that process 1 ends at step 3, and those saved."""
    saved = []
    clock = iter(range(0, 1000, 1 + 9 * ff.process_index())).__next__
    is_last = ff.process_index() == ff.process_count() - 1

    def stop(checkpoint):
        return checkpoint.replace(stop=is_last and checkpoint.step >= 3)

    note = ff.callbacks.every(seconds=2, callback=lambda c: saved.append(c.step), clock=clock)
    task = ff.TrainTask(Net().apply, optax.sgd(0.1), "crossentropy", arrays(), rngs=())
    loop = ff.TrainLoop(
        Net().init, task, 0, n_steps=9, strategy=strategy, callbacks=[note, stop], stdout=False
    )
    return {"seen": np.array([c.step for c in loop]), "saved": np.array(saved)}


def virtual(folder=None, n_steps=11):
    """Results that are to be the same to the bit; the second ones with a smaller last batch."""
    strategy = ff.DataParallel(virtual_replicas=8)
    loop, metrics = train(strategy, arrays(), n_steps, folder)
    unpadded, _ = train(strategy, arrays(), 5, pad=False)
    return {"state": part_of(loop), "metrics": metrics, "unpadded": part_of(unpadded)}


def part_of(loop):
    """The parameters and their moments."""
    return loop.state.params, loop.state.opt_state


def predict(strategy):
    """The outputs for all examples, of a model that was fitted a little."""
    model = ff.Model(Net(), optax.adam(0.01), "crossentropy", strategy=strategy)
    model.fit(X, Y, batch_size=16, epochs=1, verbose=0)
    return model.predict(X, batch_size=8)


def everything(strategy, folder):
    """All results of one strategy, by name."""
    loop, metrics = train(strategy, arrays(), 11, folder)
    results = {"params": ff.gather(loop.state.params), "metrics": metrics}
    mapped, _ = train(strategy, arrays(resident=False), 11)
    results["assembled"] = ff.gather(mapped.state.params)
    whole, _ = train(strategy, arrays(drop_remainder=True), 6)
    results["dropped"] = ff.gather(whole.state.params)
    own, _ = train(strategy, own_parts(), None)
    results["own"] = ff.gather(own.state.params)
    results["predictions"] = predict(strategy)
    results["stopped"] = stop_one(strategy)
    return results


def disagreements(strategy):
    """What each kind of difference between the processes is called, in this process."""
    index = ff.process_index()
    different = {
        "lengths": lambda: ff.ArrayStream(X[: 50 + index], Y[: 50 + index]),
        "shapes": lambda: iter([(X[: 4 + 4 * index], Y[: 4 + 4 * index])] * 3),
        "structures": lambda: iter([(X[:4], Y[:4], np.ones(4))[: 2 + index]] * 3),
    }
    found = {}
    for name, data in different.items():
        try:
            train(strategy, data(), 3)
        except ValueError as error:
            found[name] = str(error)
    return found


def main(folder):
    """Leaves the results of this process in the folder."""
    for name, strategy in STRATEGIES.items():
        results = everything(strategy(), f"{folder}/{name}")
        if ff.process_count() > 1:
            messages = json.dumps(disagreements(strategy()))
            Path(f"{folder}/{name}-{ff.process_index()}.json").write_text(messages)
        leave(f"{folder}/{name}", results)
    leave(f"{folder}/virtual", virtual(f"{folder}/virtual"))


def leave(path, results):
    """Leaves the results of this process in a file."""
    leaves = {
        f"{part}{jax.tree_util.keystr(path)}": leaf
        for part, tree in results.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    np.savez(f"{path}-{ff.process_index()}.npz", **leaves)


if __name__ == "__main__":
    main(sys.argv[1])
