"""What scaling costs: bytes per device, TrainLoop's time per step over a bare compiled call, and
the time of virtual replicas over that of plain data parallelism.

    python -m benchmarks.scaling [--rounds 15] [--steps 100] [--devices 1 2 4]

The bytes are counted from the shards of a state under `Sharded.fsdp` on eight devices; at most 1.1
of an eighth, and the small arrays. For the overhead both sides run the same update, compiled in
the same way, on the same batches, with as many steps in flight: once with batches that come from
the host, once with data that is kept on the devices. Both sides take turns at beginning a round,
and the figure to quote is the median of the ratios of the rounds. Each number of devices has a
process of its own. So do virtual replicas, eight of them, which take turns with plain
`DataParallel`. Where the load is above the number of cores, the processor's time tells more.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable

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
            for resident in (False, True):
                overhead(strategy, arguments.rounds, arguments.steps, resident=resident)
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


def parts(resident: bool = True):
    """The model and the task of a regression, with data that is kept on the devices or is not."""
    import numpy as np
    import optax
    from flax import linen as nn

    import flaxfit as ff

    model = nn.Sequential([nn.Dense(WIDTH), nn.tanh, nn.Dense(WIDTH), nn.tanh, nn.Dense(1)])
    x = np.random.default_rng(0).normal(size=(4 * BATCH, WIDTH)).astype(np.float32)
    y = np.sin(x.sum(1, keepdims=True))
    data = ff.ArrayStream(x, y, batch_size=BATCH, resident=resident)
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
    report(
        f"FSDP on 8 devices: state {layout.n_bytes:,} bytes, at most {max(per_device):,} on a "
        f"device, of these {layout.replicated_bytes:,} in small arrays (at most {limit:,.0f})"
    )


def overhead(name: str, rounds: int, n_steps: int, *, resident: bool) -> None:
    """The time of a step of TrainLoop over that of a bare call of the update it compiles."""

    import flaxfit as ff
    from flaxfit import _totals
    from flaxfit._batch import Batch, normalize
    from flaxfit._update import make_update

    model, task = parts(resident)
    strategy = ff.DataParallel() if name == "DataParallel" else ff.Sharded()
    loop = ff.TrainLoop(
        model.init, task, 0, n_steps_per_checkpoint=n_steps, strategy=strategy, stdout=False
    )
    loop.next_step()

    stream = task.data.one_epoch()
    rows = [stream.next_rows() for _ in range(len(stream))]
    examples = [normalize(stream.pick(each)) for each in rows]
    data = (strategy.place(normalize(stream.whole())),) if resident else ()
    batches = [Batch((each,)) for each in rows] if resident else examples
    state = strategy.place(loop.state)
    step = strategy.bind(ff.make_train_step(task, skip_empty=False))
    totals = strategy.place(_totals.zero_totals(jax.eval_shape(step, state, examples[0])[1]))
    update = make_update(task, axis_name=strategy.axis_name, skip_empty=False)
    arguments = (state, totals, *data, strategy.split(batches[0]))

    def stay(state, *rest):
        return strategy.constrain(update(state, *rest), state)

    call = strategy.compile(stay, arguments, n_donated=1)
    most_in_flight = 32 if resident and len(jax.devices()) == 1 else 2  # As the loop has it.

    def bare() -> None:
        nonlocal state, totals
        in_flight = deque()
        for i in range(n_steps):
            batch = strategy.split(batches[i % len(batches)])
            state, totals, _ = call(state, totals, *data, batch)
            in_flight.append(totals[0]["float32"])
            if len(in_flight) > most_in_flight:
                in_flight.popleft().block_until_ready()
        jax.block_until_ready(totals)

    ratios, first, second = compare(bare, lambda: run_loop(loop, n_steps), rounds)
    where = "on the devices" if resident else "on the host"
    report(
        f"{name} on {len(jax.devices())} devices, data {where}: bare call "
        f"{first / n_steps * 1e6:,.1f} us/step, TrainLoop {second / n_steps * 1e6:,.1f}: "
        f"x bare {ratios[0]:.3f} (at most 1.03), of the processor's time {ratios[1]:.3f}"
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

    plain, replicated = make_loop(), make_loop(virtual_replicas=8)
    ratios, first, second = compare(
        lambda: run_loop(plain, n_steps), lambda: run_loop(replicated, n_steps), rounds
    )
    report(
        f"DataParallel on {len(jax.devices())} devices: plain {first / n_steps * 1e6:,.1f} "
        f"us/step, virtual_replicas=8 {second / n_steps * 1e6:,.1f}: x plain {ratios[0]:.2f}, "
        f"of the processor's time {ratios[1]:.2f}"
    )


def run_loop(loop, n_steps: int) -> None:
    """Takes so many steps, and makes a checkpoint."""
    for _ in loop.run(n_steps):
        pass


def compare(
    first: Callable[[], None], second: Callable[[], None], rounds: int
) -> tuple[list[float], float, float]:
    """The medians of the ratios of the second to the first, and the median seconds of both.

    The ratios are those of the time that passes and of the time that this process computes.
    """
    times = []
    for number in range(rounds + 1):
        if number % 2:
            times.append((timed(first), timed(second)))
        else:
            times.append((timed(second), timed(first))[::-1])
    del times[0]  # To warm up.
    ratios = [statistics.median(b[i] / a[i] for a, b in times) for i in (0, 1)]
    passed = [[each[0] for each in side] for side in zip(*times, strict=True)]
    return ratios, statistics.median(passed[0]), statistics.median(passed[1])


def timed(function: Callable[[], None]) -> tuple[float, float]:
    """The seconds that pass and that this process computes, its threads together."""
    start = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def report(line: str) -> None:
    """Prints a figure, and how many processes wanted a core meanwhile."""
    print(f"{line} [load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores]", flush=True)


if __name__ == "__main__":
    main()
