"""What `test_many_processes` runs in each of several processes; and alone, to compare with."""

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import flaxfit as ff

if __name__ == "__main__":
    ff.initialize(heartbeat_seconds=20, shutdown_seconds=30, patience_seconds=20)

import jax
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

RNG = np.random.default_rng(0)
X = RNG.normal(size=(53, 16)).astype(np.float32)
Y = RNG.integers(0, 3, 53)
STRATEGIES = {"data_parallel": ff.DataParallel, "fsdp": ff.Sharded.fsdp}
OPTIMIZER = optax.adam(0.01)
HAS_GRAIN = importlib.util.find_spec("grain") is not None


class Net(nn.Module):
    """A kernel large enough to be split."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Dense(512)(x)))


class GivenWeights:
    """Weights that no program draws, unlike those of `fitted` and `distilled`."""

    gives_weights = True

    def __call__(self, rngs, x):
        return {"params": weights()}


def in_order(logits, labels):
    """What depends on the order of the rows: the labels by position, and their number."""
    return {"labels": labels @ np.arange(21.0), "n": len(logits)}


def train(strategy, data, n_steps, folder=None, *, measured=False, steps_per_call=1, **options):
    """Trains, perhaps measures and saves; the loop, and the metrics of its checkpoints."""
    net, init, callbacks = Net(), GivenWeights(), []
    if measured:
        metrics = ["accuracy", ff.metrics.collected(in_order, name="in_order")]
        task = ff.EvalTask(net.apply, metrics, (X[:21], Y[:21]), loss="crossentropy")
        callbacks.append(ff.EvalLoop(task))
    if folder is not None:
        callbacks.append(ff.checkpoints.CheckpointFileWriter(folder))
        init = ff.checkpoints.CheckpointFileReader(folder, init)
    task = ff.TrainTask(
        net.apply, OPTIMIZER, "crossentropy", data, ["accuracy"], rngs=(), **options
    )
    loop = ff.TrainLoop(
        init,
        task,
        0,
        n_steps=n_steps,
        n_steps_per_checkpoint=5,
        first_checkpoint=steps_per_call,
        steps_per_call=steps_per_call,
        strategy=strategy,
        callbacks=callbacks,
        stdout=False,
    )
    metrics = [checkpoint.metrics for checkpoint in loop]
    return loop, metrics


def train_line(strategy, data, n_steps, folder=None, *, callbacks=(), which="latest", rate=0.1):
    """Trains what compiles in no time, and perhaps saves it; the steps seen, the parameters."""

    def init(rngs, x):
        return {"params": np.zeros(16, np.float32)}

    task = ff.TrainTask(lambda v, x, **_: (x * v["params"], {}), optax.sgd(rate), "mse", data)
    if folder is not None:
        callbacks = [*callbacks, ff.checkpoints.CheckpointFileWriter(folder)]
        init = ff.checkpoints.CheckpointFileReader(folder, init, which=which)
    loop = ff.TrainLoop(
        init, task, 0, n_steps=n_steps, strategy=strategy, callbacks=callbacks, stdout=False
    )
    steps = [checkpoint.step for checkpoint in loop]
    return np.array(steps), ff.gather(loop.state.params)


def arrays(**options):
    """The data in an order of its own, with a remainder that divides by nothing."""
    return ff.ArrayStream(X, Y, batch_size=16, shuffle=True, **options)


def own_parts(n_batches=4):
    """The first batches of `arrays` without remainders, divided by hand."""
    stream = arrays(drop_remainder=True)
    size, index = 16 // ff.process_count(), ff.process_index()

    def parts():
        for _ in range(n_batches):
            rows = stream.next_rows()[index * size : (index + 1) * size]
            yield X[rows], Y[rows]

    return ff.data.as_stream(parts(), shared=False)


def grain_shards(is_whole=False):
    """A loader that gives each process a shard, or all of them everything."""
    import grain.python as grain

    class Pick(grain.MapTransform):
        def map(self, element) -> Any:
            return X[element], X[element]

    shards = grain.NoSharding() if is_whole else grain.ShardByJaxProcess()
    return grain.DataLoader(
        data_source=grain.RangeDataSource(0, 53, 1),
        sampler=grain.IndexSampler(53, shards, shuffle=True, num_epochs=2, seed=3),
        operations=[Pick(), grain.Batch(8, drop_remainder=True)],
    )


def with_grain(strategy, folder):
    """Results of a loader of Grain in shards, run at once, and stopped and resumed."""
    data = ff.data.as_stream(grain_shards())
    first = np.concatenate([x for x, _ in itertools.islice(data, 6)])
    _, whole = train_line(strategy, grain_shards(), 6)
    train_line(strategy, grain_shards(), 3, f"{folder}/shards")
    steps, resumed = train_line(strategy, grain_shards(), 6, f"{folder}/shards")
    return {"rows": first, "steps": steps, "resumed": resumed, "whole": whole}


def stop_one(strategy):
    """The steps of the checkpoints of a run that process 1 ends at step 3, and those saved."""
    saved = []
    clock = iter(range(0, 1000, 1 + 9 * ff.process_index())).__next__
    is_last = ff.process_index() == ff.process_count() - 1

    def stop(checkpoint):
        return checkpoint.replace(stop=is_last and checkpoint.step >= 3)

    note = ff.callbacks.every(seconds=2, callback=lambda c: saved.append(c.step), clock=clock)
    seen, _ = train_line(strategy, ff.ArrayStream(X, X, batch_size=16), 9, callbacks=[note, stop])
    return {"seen": seen, "saved": np.array(saved)}


def train_virtual(folder=None, n_steps=6):
    """A run whose numbers are to be the same to the bit, with a padded batch."""
    strategy = ff.DataParallel(virtual_replicas=8)
    return train(strategy, arrays(), n_steps, folder, measured=True)


def virtual(folder=None, n_steps=6):
    """Its results, and those of a smaller batch."""
    loop, metrics = train_virtual(folder, n_steps)
    rest = ff.ArrayStream(X[48:], Y[48:], batch_size=16)
    smaller, _ = train(ff.DataParallel(virtual_replicas=8), rest, 2, pad=False)
    return {"state": part_of(loop), "metrics": metrics, "smaller": part_of(smaller)}


def part_of(loop):
    """The parameters and their moments."""
    return loop.state.params, loop.state.opt_state


def trained(strategy, folder):
    """What a run comes to that is measured and saved."""
    loop, metrics = train(strategy, arrays(), 6, folder, measured=True)
    return loop, {"params": ff.gather(loop.state.params), "metrics": metrics}


def fitted(strategy):
    """A model that is fitted a little."""
    model = ff.Model(Net(), OPTIMIZER, "crossentropy", strategy=strategy)
    model.fit(X, Y, batch_size=16, epochs=1, verbose=0)
    return model


def predict(strategy, state):
    """The outputs for all examples."""
    model = ff.Model(Net(), OPTIMIZER, "crossentropy", strategy=strategy)
    model.state = state
    return model.predict(X, batch_size=8)


def weights():
    """Parameters that no seed leads to."""
    return {
        "Dense_0": {"bias": X[0, :3], "kernel": np.tile(X[:32, :3] / 64, (16, 1))},
        "Dense_1": {"bias": np.tile(X[1], 32), "kernel": np.tile(X[:16], 32)},
    }


def warm(strategy, folder):
    """A model after a fit, at rate 0, that begins with two files of weights."""
    path = f"{folder}-{ff.process_index()}.safetensors"
    ff.checkpoints.save_weights(path, weights())
    model = ff.Model(Net(), optax.adam(0.0), "crossentropy", strategy=strategy)
    model.load_weights(path, partial="Dense_0/.*")
    model.load_weights(path, partial="Dense_1/.*")
    model.fit(X, Y, batch_size=16, verbose=0)
    return model


def instance(strategy):
    """The weights of an NNX instance after a fit, and those of its model."""
    net = nnx.Linear(16, 512, rngs=nnx.Rngs(0))
    model = ff.Model(net, OPTIMIZER, "crossentropy", strategy=strategy)
    model.fit(X, Y, batch_size=16, verbose=0)
    return ff.gather((nnx.to_pure_dict(nnx.state(net, nnx.Param)), model.state.params))


def distilled(strategy, folder=None):
    """The losses of a model that imitates a frozen one, which its checkpoints hold."""

    def imitate(apply, batch, rngs, teacher):
        return ((apply(*batch.inputs) - teacher(*batch.inputs)) ** 2).mean(-1)

    companions = {"teacher": (Net(), {"params": weights()})}
    options = {"objective": imitate, "companions": companions, "save_companions": True}
    model = ff.Model(Net(), OPTIMIZER, strategy=strategy, **options)
    data = {"validation_data": (X[:21], ()), "checkpoint_dir": folder}
    history = model.fit(X, (), batch_size=16, verbose=0, **data)
    return {name: np.array(history[name]) for name in ("loss", "val_loss")}


def everything(strategy, folder, *, is_whole):
    """All results of one strategy, or those of usual tests, by name, and a model that is fitted."""
    loop, results = trained(strategy, folder)
    results["predictions"] = predict(strategy, loop.state)
    mapped, _ = train(strategy, arrays(resident=False), 6)
    results["assembled"] = ff.gather(mapped.state.params)
    if isinstance(strategy, ff.DataParallel):
        model = fitted(strategy)
        results["fitted"] = model.predict(X, batch_size=8)
        if not is_whole:
            return results, model
    results["stopped"] = stop_one(strategy)
    own, _ = train(strategy, own_parts(), None, steps_per_call=2)
    results["own"] = ff.gather(own.state.params)
    results["instance"] = instance(strategy)
    results["distilled"] = distilled(strategy, f"{folder}-distilled")
    model = warm(strategy, folder)
    results["warm"] = ff.gather(model.state.params)
    return results, model


def disagreements(strategy):
    """What each kind of difference between the processes is called, in this process."""
    index = ff.process_index()

    def own(*batch):
        return ff.data.as_stream([batch] * 3, shared=False)

    different = {
        "lengths": ff.ArrayStream(X[: 50 + index], X[: 50 + index]),
        "shapes": own(X[: 4 + 4 * index], X[: 4 + 4 * index]),
        "structures": own(*(X[:4], X[:4], np.ones(4))[: 2 + index]),
    }
    found = refusals(lambda data: train_line(strategy, data, 3), different)
    data, rates = ff.ArrayStream(X, X), {"rates": 0.1 * (1 + index)}
    found |= refusals(lambda rate: train_line(strategy, data, 3, rate=rate), rates)
    net = nnx.Linear(16, 512, rngs=nnx.Rngs(index))
    model = ff.Model(net, OPTIMIZER, "crossentropy", strategy=strategy)
    found |= refusals(lambda _: model.fit(X, Y, batch_size=16, verbose=0), {"instances": 0})
    model = ff.Model(Net(), OPTIMIZER, "crossentropy", strategy=strategy)
    model.fit(X, Y, batch_size=16, verbose=0)
    new = [np.full(w.shape, index, w.dtype) for w in jax.tree.leaves(model.state.params)]
    return found | refusals(model.set_weights, {"weights": new})


def shared_batches():
    """Data that is the same in every process, which nobody has divided."""
    batches = [(X[:8], X[:8])] * 3
    data = {
        "a list": batches,
        "a generator": iter(batches),
        "a callable": lambda: iter(batches),
        "prefetched": ff.data.prefetch(batches),
    }
    return data | ({"grain": grain_shards(is_whole=True)} if HAS_GRAIN else {})


def undivided(strategy, model):
    """What is said of such data in training, evaluation and prediction, in this process."""
    state = ff.InferenceState(np.int32(0), np.zeros(16, np.float32), {})
    task = ff.EvalTask(lambda v, x: x * v["params"], ["mse"])
    uses = {
        "train": lambda data: train_line(strategy, data, 3),
        "measure": lambda data: ff.EvalLoop(task, strategy=strategy).measure(state, data),
        "fit": lambda data: model.fit(data, verbose=0),
        "predict": model.predict,
    }
    return {name: refusals(use, shared_batches()) for name, use in uses.items()}


def refusals(use, data):
    """The messages of the errors that each kind of data leads to, by name."""
    found = {}
    for name, each in data.items():
        try:
            use(each)
        except ValueError as error:
            found[name] = str(error)
    return found


def main(folder, *, is_thorough):
    """Leaves all results of this process in the folder, or those that usual tests need."""
    for name, make in STRATEGIES.items():
        strategy, path = make(), f"{folder}/{name}"
        results, model = everything(strategy, path, is_whole=is_thorough or name == "fsdp")
        leave(path, results)
        said = disagreements(strategy) | {"undivided": undivided(strategy, model)}
        Path(f"{path}-{ff.process_index()}.json").write_text(json.dumps(said))
    leave(f"{folder}/virtual", virtual(f"{folder}/virtual"))
    mapped = ff.DataParallel(implementation="shard_map")
    loop, results = trained(mapped, f"{folder}/mapped")
    leave(f"{folder}/mapped", results | {"predictions": predict(mapped, loop.state)})
    if HAS_GRAIN:
        leave(f"{folder}/grain", with_grain(ff.DataParallel(), folder))


def only_bits(folder, names):
    """Leaves what is to be the same to the bit wherever a device is, of these strategies."""
    for name in names:
        path = f"{folder}/{name}"
        results = virtual(path) if name == "virtual" else trained(STRATEGIES[name](), path)[1]
        leave(path, results)


def leave(path, results):
    """Leaves the results of this process in a file."""
    leaves = {
        f"{part}{jax.tree_util.keystr(path)}": leaf
        for part, tree in results.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    np.savez(f"{path}-{ff.process_index()}.npz", **leaves)


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    if names in ([], ["thorough"]):
        main(folder, is_thorough=bool(names))
    else:
        only_bits(folder, names)
