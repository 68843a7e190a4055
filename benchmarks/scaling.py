"""The cost of scaling: bytes per device, TrainLoop's time per step over a bare compiled call, and
the time of virtual replicas over that of plain data parallelism.

    python -m benchmarks.scaling [--rounds 41] [--steps 40] [--devices 1 2 4] [--processes 3]

The bytes are counted from the shards of a state under `Sharded.fsdp` on eight devices; at most 1.1
of an eighth, and the small arrays. For the overhead both sides run the same update, compiled in
the same way, on the same batches, with as many steps in flight: once with batches that lie ready
on the host, once with data that is kept on the devices. Both sides take turns at beginning a round.
Each number of devices has processes of its own, as the memory that one happens to get makes it
faster or slower than the next; the figure to quote is the median of the ratios of all rounds in
all of them, and behind it stands where that median lies with 95 % certainty. So it is with virtual
replicas, eight of them, which take turns with plain `DataParallel`. Where the load is above the
number of cores, the processor's time tells more.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

import jax

from benchmarks.turns import around_median

WIDTH, BATCH = 256, 256
_ROUNDS = "rounds: "


def main() -> None:
    """Prints all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--steps", type=int, default=40, help="in each round")
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--processes", type=int, default=3, help="for each number of devices")
    parser.add_argument("--only", choices=["memory", "overhead", "virtual"])
    arguments = parser.parse_args()
    rounds, n_steps = arguments.rounds, arguments.steps
    if arguments.only == "memory":
        jax.config.update("jax_num_cpu_devices", 8)
        memory()
    elif arguments.only == "overhead":
        jax.config.update("jax_num_cpu_devices", arguments.devices[0])
        for strategy in ("DataParallel", "Sharded"):
            for resident in (False, True):
                overhead(strategy, rounds, n_steps, resident=resident)
    elif arguments.only == "virtual":
        jax.config.update("jax_num_cpu_devices", arguments.devices[0])
        virtual(rounds, n_steps)
    else:
        run("--only", "memory")
        for only in ("overhead", "virtual"):
            for n in arguments.devices:
                more = f"--only {only} --devices {n} --rounds {rounds} --steps {n_steps}".split()
                pooled = [run(*more, is_quiet=True) for _ in range(arguments.processes)]
                for same in zip(*pooled, strict=True):
                    print(same[0].joined(same[1:]), flush=True)


def run(*arguments: str, is_quiet: bool = False) -> list["Comparison"]:
    """Runs this benchmark in a separate process; returns its comparisons."""
    command = [sys.executable, "-m", "benchmarks.scaling", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    if not is_quiet:
        print(done.stdout, end="")
    lines = [
        line.removeprefix(_ROUNDS) for line in done.stdout.splitlines() if line.startswith(_ROUNDS)
    ]
    return [Comparison(**json.loads(line)) for line in lines]


@dataclasses.dataclass
class Comparison:
    """Seconds per step of two contenders in each round: wall time and processor time."""

    name: str
    base: str
    other: str
    limit: str
    passed: list[tuple[float, float]]
    computed: list[tuple[float, float]]
    load: float

    def joined(self, others: Sequence["Comparison"]) -> "Comparison":
        """Returns it with the rounds of others."""
        more = [self, *others]
        return dataclasses.replace(
            self,
            passed=[pair for each in more for pair in each.passed],
            computed=[pair for each in more for pair in each.computed],
            load=max(each.load for each in more),
        )

    def __str__(self) -> str:
        first, second = (statistics.median(side) * 1e6 for side in zip(*self.passed, strict=True))
        ratios = [b / a for a, b in self.passed]
        low, high = around_median(ratios)
        computed = statistics.median(b / a for a, b in self.computed)
        return (
            f"{self.name}: {self.base} {first:,.1f} us/step, {self.other} {second:,.1f}: "
            f"x {statistics.median(ratios):.3f}{self.limit}, between {low:.3f} and {high:.3f}, of "
            f"the processor's time {computed:.3f} "
            f"[{len(ratios)} rounds, load {self.load:.1f} on {os.cpu_count()} cores]"
        )


def parts(resident: bool = True):
    """Returns model and task of a regression, with resident data or not."""
    import numpy as np
    import optax
    from flax import linen as nn

    import flaxfit as ff

    model = nn.Sequential([nn.Dense(WIDTH), nn.tanh, nn.Dense(WIDTH), nn.tanh, nn.Dense(1)])
    x = np.random.default_rng(0).normal(size=(4 * BATCH, WIDTH)).astype(np.float32)
    y = np.sin(x.sum(1, keepdims=True))
    batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]
    kept = ff.ArrayStream(x, y, batch_size=BATCH, resident=True)
    data = kept if resident else itertools.cycle(batches)
    return model, ff.TrainTask(model.apply, optax.adam(1e-3), "mse", data), batches


def memory() -> None:
    """Measures the bytes of the state on each of eight devices under FSDP."""
    import flaxfit as ff

    model, task, _ = parts()
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
        f"device, of these {layout.replicated_bytes:,} in small arrays (at most {limit:,.0f})"
    )


def overhead(name: str, rounds: int, n_steps: int, *, resident: bool) -> None:
    """Compares a step of TrainLoop with a bare call of its compiled update."""

    import numpy as np

    import flaxfit as ff
    from flaxfit.data._batch import Batch, normalize
    from flaxfit.step import _metric_totals
    from flaxfit.step._scan import make_update

    model, task, batches = parts(resident)
    strategy = ff.DataParallel() if name == "DataParallel" else ff.Sharded()
    loop = ff.TrainLoop(
        model.init, task, 0, n_steps_per_checkpoint=n_steps, strategy=strategy, stdout=False
    )
    loop.next_step()

    data = ()
    # With weights of 1, as where any batch may turn out to be smaller than the others.
    ones = np.ones(BATCH, np.float32)
    examples = given = [normalize(batch)._replace(weights=ones) for batch in batches]
    if resident:
        examples = [each._replace(weights=None) for each in examples]
        stream = task.data.one_epoch()
        data = (strategy.place(normalize(stream.whole())),)
        given = [Batch((stream.next_rows(),)) for _ in range(len(stream))]
    state = strategy.place(loop.state)
    step = strategy.bind(ff.make_train_step(task, skip_empty=False))
    totals = strategy.place(_metric_totals.zero_totals(jax.eval_shape(step, state, examples[0])[1]))
    update = make_update(task, axis_name=strategy.axis_name, skip_empty=False)
    arguments = (state, totals, *data, strategy.split(given[0]))

    def stay(state, *rest):
        return strategy.constrain(update(state, *rest), state)

    call = strategy.compile(stay, arguments, n_donated=1)
    most_in_flight = 32 if resident and len(jax.devices()) == 1 else 2  # As the loop has it.

    def bare() -> None:
        nonlocal state, totals
        in_flight = deque()
        for i in range(n_steps):
            batch = strategy.split(given[i % len(given)])
            state, totals, _ = call(state, totals, *data, batch)
            in_flight.append(totals["float32"])
            if len(in_flight) > most_in_flight:
                in_flight.popleft().block_until_ready()
        jax.block_until_ready(totals)

    where = "on the devices" if resident else "on the host"
    compare(
        f"{name} on {len(jax.devices())} devices, data {where}",
        {"bare call": bare, "TrainLoop": lambda: run_loop(loop, n_steps)},
        rounds,
        n_steps,
        " (at most 1.03)",
    )


def virtual(rounds: int, n_steps: int) -> None:
    """Compares a step in eight virtual replicas with a plain one."""
    import flaxfit as ff

    def make_loop(**options):
        model, task, _ = parts()
        strategy = ff.DataParallel(**options)
        loop = ff.TrainLoop(
            model.init, task, 0, n_steps_per_checkpoint=n_steps, strategy=strategy, stdout=False
        )
        loop.next_step()
        return loop

    plain, replicated = make_loop(), make_loop(virtual_replicas=8)
    compare(
        f"DataParallel on {len(jax.devices())} devices",
        {
            "plain": lambda: run_loop(plain, n_steps),
            "virtual_replicas=8": lambda: run_loop(replicated, n_steps),
        },
        rounds,
        n_steps,
    )


def run_loop(loop, n_steps: int) -> None:
    """Takes that many steps, and makes a checkpoint."""
    for _ in loop.run(n_steps):
        pass


def compare(
    name: str,
    contenders: dict[str, Callable[[], None]],
    rounds: int,
    n_steps: int,
    limit: str = "",
) -> None:
    """Prints the comparison of two contenders, and their times in each round."""
    (base, first), (other, second) = contenders.items()
    times = []
    for number in range(rounds + 1):
        if number % 2:
            times.append((timed(first), timed(second)))
        else:
            times.append((timed(second), timed(first))[::-1])
    del times[0]  # To warm up.
    passed, computed = ([(a[i] / n_steps, b[i] / n_steps) for a, b in times] for i in (0, 1))
    found = Comparison(name, base, other, limit, passed, computed, os.getloadavg()[0])
    print(found)
    print(_ROUNDS + json.dumps(dataclasses.asdict(found)), flush=True)


def timed(function: Callable[[], None]) -> tuple[float, float]:
    """Returns wall time and processor time of all threads, in seconds."""
    start = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - start[0], time.process_time() - start[1]


if __name__ == "__main__":
    main()
