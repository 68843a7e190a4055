"""Time per training step: TrainLoop beside a hand-written `jit` loop, on the digits MLP.

    python -m benchmarks.steps [--rounds 15] [--devices 1] [--width 128] [--batch-size 64]

All train the same model on the same batches with the same optimizer and count accuracy inside the
step; one TrainLoop takes 32 steps in one dispatch. They take turns; the figure to quote is the
median of the ratios of the rounds. Few hidden units and small batches leave nothing but what the
host does for each step.
"""

import argparse
import collections
import statistics
import time

import jax


def main() -> None:
    """Prints microseconds per step and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=560)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=64)
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(arguments.devices, 1))

    n_steps, n_devices = arguments.steps, arguments.devices
    sizes = {"width": arguments.width, "batch_size": arguments.batch_size}
    contenders = {
        "hand-written jit loop": hand_written(n_steps, **sizes),
        "TrainLoop": train_loop(n_steps, n_devices, **sizes),
        "TrainLoop, 32 a call": train_loop(n_steps, n_devices, steps_per_call=32, **sizes),
    }
    times = {name: [] for name in contenders}
    losses = {}
    for _ in range(arguments.rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            losses[name] = run()
            times[name].append((time.perf_counter() - start) / arguments.steps * 1e6)
    first = losses["hand-written jit loop"]
    if any(abs(loss - first) > 1e-3 * abs(first) + 1e-5 for loss in losses.values()):
        raise SystemExit(f"The losses disagree, so the times compare nothing: {losses}")
    base = times["hand-written jit loop"]
    for name, values in times.items():
        ratio = statistics.median(a / b for a, b in zip(values, base, strict=True))
        print(
            f"{name:24} {statistics.median(values):8.1f} us/step   min {min(values):7.1f}"
            f"   x hand-written {ratio:.3f}   (loss {losses[name]:.6f})"
        )


def task_parts(width: int = 128):
    """The model, the optimizer and the data that all use."""
    import numpy as np
    import optax
    from flax import linen as nn
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype(np.float32), y.astype(np.int32)
    model = nn.Sequential([nn.Dense(width), nn.relu, nn.Dense(10)])
    return model, optax.adam(1e-3), x, y


def hand_written(n_steps: int, *, width: int, batch_size: int):
    """A donating jit step over NumPy batches, the metrics added up inside."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    model, optimizer, x, y = task_parts(width)
    n_examples = 28 * batch_size
    params = model.init(jax.random.key(0), x[:1])["params"]
    zeros = {"loss": jnp.zeros(()), "correct": jnp.zeros(()), "n": jnp.zeros(())}
    carry = [params, optimizer.init(params), zeros]

    def update(params, opt_state, sums, x, y):
        def loss_fn(params):
            logits = model.apply({"params": params}, x)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return losses.mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        sums = {
            "loss": sums["loss"] + loss * len(x),
            "correct": sums["correct"] + (logits.argmax(-1) == y).sum(),
            "n": sums["n"] + len(x),
        }
        return optax.apply_updates(params, updates), opt_state, sums

    update = jax.jit(update, donate_argnums=(0, 1, 2))
    epoch = [0]

    def run():
        carry[2] = jax.tree.map(jnp.zeros_like, carry[2])
        for _ in range(n_steps // 28):
            order = np.random.default_rng((0, epoch[0])).permutation(n_examples)
            epoch[0] += 1
            for i in range(0, n_examples, batch_size):
                rows = order[i : i + batch_size]
                carry[:] = update(*carry, x[rows], y[rows])
        return float(carry[2]["loss"]) / float(carry[2]["n"])

    return run


def train_loop(
    n_steps: int, n_devices: int, *, steps_per_call: int = 1, width: int, batch_size: int
):
    """TrainLoop with a metric, a callback and no display."""
    import flaxfit as ff

    model, optimizer, x, y = task_parts(width)
    seen = collections.deque(maxlen=1)

    n_examples = 28 * batch_size
    stream = ff.ArrayStream(x[:n_examples], y[:n_examples], batch_size=batch_size, shuffle=True)
    task = ff.TrainTask(model.apply, optimizer, "crossentropy", stream, ["accuracy"])
    state = ff.init_state(model.init, optimizer, jax.random.key(0), (x[:1],))
    params = model.init(jax.random.key(0), x[:1])["params"]
    loop = ff.TrainLoop(
        state.replace(params=params),
        task,
        n_steps_per_checkpoint=n_steps,
        first_checkpoint=n_steps,
        steps_per_call=steps_per_call,
        devices=jax.devices()[:n_devices],
        callbacks=[seen.append],
        stdout=False,
    )
    return lambda: loop.next_checkpoint().loss


if __name__ == "__main__":
    main()
