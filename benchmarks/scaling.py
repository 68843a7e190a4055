"""What scaling costs: bytes per device, TrainLoop's time per step over a bare compiled call, and
the time of virtual replicas over that of plain data parallelism.

    python -m benchmarks.scaling [--rounds 15] [--steps 100] [--devices 1 2 4]

The bytes are counted from the shards of a state under `Sharded.fsdp` on eight devices. For the
overhead both sides run the very same compiled update on the same batches, with at most two steps
in flight; rounds alternate, and the figure to quote is the median of the ratios of the rounds.
Each number of devices has a process of its own. So do virtual replicas, eight of them, with whose
loop that of a plain `DataParallel` alternates.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections import deque

import jax

WIDTH, BATCH = 256, 256


def main() -> None:
    """Prints all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--only", choices=["memory", "overhead", "virtual"])
    arguments = parser.parse_args()
    if arguments.only == "memory":
        jax.config.update("jax_num_cpu_devices", 8)
        memory()
    elif arguments.only == "overhead":
        jax.config.update("jax_num_cpu_devices", arguments.devices[0])
        for strategy in ("DataParallel", "Sharded"):
            overhead(strategy, arguments.rounds, arguments.steps)
    elif arguments.only == "virtual":
        jax.config.update("jax_num_cpu_devices", arguments.devices[0])
        virtual(arguments.rounds, arguments.steps)
    else:
        run("--only", "memory")
        for only in ("overhead", "virtual"):
            for n in arguments.devices:
                more = f"--devices {n} --rounds {arguments.rounds} --steps {arguments.steps}"
                run("--only", only, *more.split())


def run(*arguments: str) -> None:
    """Runs this benchmark in a process of its own."""
    subprocess.run([sys.executable, "-m", "benchmarks.scaling", *arguments], check=True)


def parts():
    """The task, without its data, and batches of a regression."""
    import numpy as np
    import optax
    from flax import linen as nn

    import flaxfit as ff

    model = nn.Sequential([nn.Dense(WIDTH), nn.tanh, nn.Dense(WIDTH), nn.tanh, nn.Dense(1)])
    x = np.random.default_rng(0).normal(size=(4 * BATCH, WIDTH)).astype(np.float32)
    y = np.sin(x.sum(1, keepdims=True))
    data = ff.ArrayStream(x, y, batch_size=BATCH)
    return model, ff.TrainTask(model.apply, optax.adam(1e-3), "mse", data)


def memory() -> None:
    """Bytes of the state on each of eight devices under FSDP."""
    import flaxfit as ff

    model, task = parts()
    strategy = ff.Sharded.fsdp()
    state = ff.TrainLoop(model.init, task, 0, strategy=strategy, stdout=False).state
    layout = strategy.describe(state)
    arrays = jax.tree.leaves((state.params, state.opt_state))
    per_device = [
        sum(s.data.nbytes for a in arrays for s in a.addressable_shards if s.device == device)
        for device in jax.devices()
    ]
    limit = 1.1 * layout.n_bytes / len(jax.devices()) + layout.replicated_bytes
    print(
        f"FSDP on 8 devices: state {layout.n_bytes:,} bytes, at most {max(per_device):,} on a "
        f"device, of these {layout.replicated_bytes:,} in small arrays (limit {limit:,.0f})"
    )


def overhead(name: str, rounds: int, n_steps: int) -> None:
    """The time of a step of TrainLoop over that of a bare call of the update it compiles."""
    import numpy as np

    import flaxfit as ff
    from flaxfit import _totals
    from flaxfit._batch import normalize
    from flaxfit._update import make_update

    model, task = parts()
    strategy = ff.DataParallel() if name == "DataParallel" else ff.Sharded()
    loop = ff.TrainLoop(
        model.init, task, 0, n_steps_per_checkpoint=n_steps, strategy=strategy, stdout=False
    )
    loop.next_step()

    # With weights, as the loop gives them to every batch that could be padded.
    weights = np.ones(BATCH, np.float32)
    batches = [normalize(next(task.data))._replace(weights=weights) for _ in range(4)]
    state = strategy.place(loop.state)
    step = strategy.bind(ff.make_train_step(task, skip_empty=False))
    totals = strategy.place(_totals.zero_totals(jax.eval_shape(step, state, batches[0])[1]))
    update = make_update(task, axis_name=strategy.axis_name, skip_empty=False)
    arguments = (state, totals, strategy.split(batches[0]))
    call = strategy.compile(update, arguments, n_donated=2)

    def bare() -> float:
        nonlocal state, totals
        in_flight = deque()
        start = time.perf_counter()
        for i in range(n_steps):
            batch = strategy.split(batches[i % 4])
            state, totals, (token, _) = call(state, totals, batch)
            in_flight.append(token)
            if len(in_flight) > 2:
                in_flight.popleft().block_until_ready()
        jax.block_until_ready(totals)
        return time.perf_counter() - start

    def through_loop() -> float:
        start = time.perf_counter()
        for _ in loop.run(n_steps):
            pass
        return time.perf_counter() - start

    bare(), through_loop()
    times = [(bare(), through_loop()) for _ in range(rounds)]
    ratio = statistics.median(b / a for a, b in times)
    micros = [statistics.median(t) / n_steps * 1e6 for t in zip(*times, strict=True)]
    print(
        f"{name:12} on {len(jax.devices())} devices: bare call {micros[0]:8.1f} us/step, "
        f"TrainLoop {micros[1]:8.1f}   x bare {ratio:.3f}"
    )


def virtual(rounds: int, n_steps: int) -> None:
    """The time of a step in eight virtual replicas over that of a plain one."""
    import flaxfit as ff

    def make_loop(**options):
        model, task = parts()
        strategy = ff.DataParallel(**options)
        loop = ff.TrainLoop(
            model.init, task, 0, n_steps_per_checkpoint=n_steps, strategy=strategy, stdout=False
        )
        loop.next_step()
        return loop

    def seconds(loop) -> float:
        start = time.perf_counter()
        for _ in loop.run(n_steps):
            pass
        return time.perf_counter() - start

    loops = make_loop(), make_loop(virtual_replicas=8)
    times = [tuple(map(seconds, loops)) for _ in range(rounds + 1)][1:]
    ratio = statistics.median(b / a for a, b in times)
    micros = [statistics.median(t) / n_steps * 1e6 for t in zip(*times, strict=True)]
    print(
        f"DataParallel on {len(jax.devices())} devices: plain {micros[0]:8.1f} us/step, "
        f"virtual_replicas=8 {micros[1]:8.1f}   x plain {ratio:.2f}"
    )


if __name__ == "__main__":
    main()
