"""The cost of exact objectives: token weights, a gathered contrastive loss, collected metrics.

    python -m benchmarks.objectives [--rounds 15] [--small]

Each step is compared with the one that it should cost no more than: token weights and ignored
labels with the unweighted step of the same language model; the contrastive loss on two devices with
a loop by hand, `jax.jit` over a mesh; the step that reports the norm of its gradient with one that
does not. The order within a round is by chance; the figure to quote is the median of the ratios of
the rounds. First comes the memory of the host that a metric takes that collects a million rows of
two numbers.
"""

import argparse
import functools
import resource
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flaxfit as ff
from benchmarks.turns import around_median, ratio, take_turns

STEPS = 8
VOCABULARY, WIDTH = 256, 64


def main() -> None:
    """Prints all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="only whether it works")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    size = 8 if arguments.small else 1
    n_rows = 1_000_000 // size  # First, as the peak of what comes later is higher.
    print(f"collected: {collected(n_rows):.0f} MiB for {n_rows:,} rows (at most {100 // size})")
    report("language model", token_weights(32 // size), arguments.rounds, "at most 1.03")
    report("contrastive, 2 devices", contrastive(512 // size), arguments.rounds, "at most 1.10")
    report("convolutions", gradient_norm(64 // size), arguments.rounds, "at most 1.05")


def report(name: str, contenders: dict[str, Callable[[], float]], rounds: int, limit: str) -> None:
    """Prints the time of each contender and its ratio to the first."""
    times, _ = take_turns(contenders, rounds, STEPS)
    base = next(iter(times.values()))
    for contender, values in times.items():
        low, high = around_median([a / b for a, b in zip(values, base, strict=True)])
        print(
            f"{name}, {contender}: {statistics.median(values) / 1e3:.2f} ms/step, x "
            f"{ratio(values, base):.3f} ({limit}), between {low:.3f} and {high:.3f}",
            flush=True,
        )


def run_of(module: nn.Module, task: ff.TrainTask, **options: object) -> Callable[[], float]:
    """Returns a function that takes that many steps and returns the loss."""
    loop = ff.TrainLoop(
        module,
        task,
        0,
        n_steps_per_checkpoint=STEPS,
        first_checkpoint=STEPS,
        stdout=False,
        **options,
    )
    return lambda: loop.next_checkpoint().loss


class LanguageModel(nn.Module):
    """A causal transformer of two layers."""

    @nn.compact
    def __call__(self, tokens):
        h = nn.Embed(VOCABULARY, WIDTH)(tokens)
        for _ in range(2):
            mask = nn.make_causal_mask(tokens)
            h = h + nn.SelfAttention(4)(nn.LayerNorm()(h), mask=mask)
            h = h + nn.Dense(WIDTH)(nn.relu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(h))))
        return nn.Dense(VOCABULARY)(h)


def token_weights(batch_size: int) -> dict[str, Callable[[], float]]:
    """Compares steps of a language model without weights and with token weights."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, VOCABULARY, (2, STEPS * batch_size, 64)).astype(np.int32)
    counts = rng.random(y.shape) > 0.3
    ignoring = ff.losses.crossentropy(ignore_label=-100), ff.metrics.accuracy(ignore_label=-100)
    contenders = {
        "no weights": ("crossentropy", "accuracy", y, None),
        "token weights": ("crossentropy", "accuracy", y, counts.astype(np.float32)),
        "ignore_label": (*ignoring, np.where(counts, y, -100), None),
    }

    def run_with(loss, metric, y, weights):
        data = ff.ArrayStream(x, y, weights, batch_size=batch_size, shuffle=True)
        task = ff.TrainTask(LanguageModel(), optax.adam(1e-3), loss, data, [metric])
        return run_of(LanguageModel(), task, devices=jax.devices()[:1])

    return {name: run_with(*parts) for name, parts in contenders.items()}


class Towers(nn.Module):
    """Two networks, one for each side of the pairs."""

    @nn.compact
    def __call__(self, a, b):
        def tower(x, name):
            return nn.Dense(64, name=f"{name}_out")(nn.relu(nn.Dense(512, name=name)(x)))

        return tower(a, "image"), tower(b, "text")


def info_nce(a, b):
    """Computes `ff.losses.info_nce` by hand."""
    a, b = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
    logits, own = 10 * a @ b.T, jnp.arange(len(a))
    return (ff.losses.crossentropy(logits, own) + ff.losses.crossentropy(logits.T, own)) / 2


def contrastive(batch_size: int) -> dict[str, Callable[[], float]]:
    """Compares steps of a contrastive loss over two devices, by hand and by strategy."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, STEPS * batch_size, 256)).astype(np.float32)
    module, optimizer, devices = Towers(), optax.adam(1e-3), jax.devices()[:2]
    loss = ff.losses.info_nce(temperature=0.1)

    def run_with(strategy):
        data = ff.ArrayStream((a, b), (), batch_size=batch_size, shuffle=True, resident=False)
        task = ff.TrainTask(module, optimizer, loss, data, across="batch")
        return run_of(module, task, strategy=strategy)

    mesh = Mesh(np.array(devices), ("data",))
    whole, divided = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, *inputs):
        def loss(params):
            return info_nce(*module.apply({"params": params}, *inputs)).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, optax.tree.norm(grads)

    params = module.init(jax.random.key(0), a[:2], b[:2])["params"]
    state = [jax.device_put((params, optimizer.init(params)), whole)]

    def by_hand():
        order, value = rng.permutation(len(a)).reshape(STEPS, -1), 0.0
        for rows in order:
            *state[0], value, _ = step(
                *state[0], *(jax.device_put(x[rows], divided) for x in (a, b))
            )
        return float(value)

    return {
        "by hand": by_hand,
        "DataParallel": run_with(ff.DataParallel(devices)),
        "Sharded": run_with(ff.Sharded(devices=devices)),
    }


class Convolutions(nn.Module):
    """The usual network for Atari games."""

    @nn.compact
    def __call__(self, x):
        for width, size, stride in (32, 8, 4), (64, 4, 2), (64, 3, 1):
            x = nn.relu(nn.Conv(width, (size, size), (stride, stride))(x))
        return nn.Dense(6)(nn.relu(nn.Dense(512)(x.reshape(len(x), -1))))


def gradient_norm(batch_size: int) -> dict[str, Callable[[], float]]:
    """Compares steps of convolutions with and without the gradient norm."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch_size, 84, 84, 4)).astype(np.float32)
    data = ff.ArrayStream(x, rng.integers(0, 6, batch_size), batch_size=batch_size)

    def run_with(grad_norm):
        task = ff.TrainTask(Convolutions(), optax.adam(1e-3), "crossentropy", data)
        options = {"devices": jax.devices()[:1], "grad_norm": grad_norm}
        return run_of(Convolutions(), task, **options)

    return {"no norm": run_with(False), "gradient norm": run_with(True)}


def collected(n_rows: int) -> float:
    """Returns the MiB that a metric of collected rows of two numbers adds to the peak memory."""
    x, y = np.random.default_rng(0).normal(size=(2, n_rows, 1)).astype(np.float32)

    def correlation(outputs, targets):
        return float(np.corrcoef(outputs[:, 0], targets[:, 0])[0, 1])

    def measure(metric):
        data = ff.ArrayStream(x, y, batch_size=8192)
        task = ff.EvalTask(lambda variables, x: x, {"metric": metric}, data)
        ff.EvalLoop(task).measure(ff.InferenceState.create({"params": {}}))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    before = measure("mse")
    return measure(ff.metrics.collected(correlation, max_rows=n_rows)) - before


if __name__ == "__main__":
    main()
