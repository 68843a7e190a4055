"""How costs grow with the work, and a check of the costs that must not grow.

    python -m benchmarks.growth [--sections arrays epochs fits] [--quick] [--output growth.json]

* arrays: the time of a step of 10 to 1,000 parameter arrays, beside a hand-written loop. What XLA
  takes to compile such a step on a CPU, also a hand-written one, grows with their square: 2 GiB at
  2,000 arrays, 7 GiB at 4,000, and more than 24 GB at 10,000.
* checkpoints: saving 1 MiB to 2 GiB, as far as a quarter of the free memory and disk goes.
* restores: restoring a state that is split over 1 to 8 simulated devices.
* epochs: an epoch of 10^3 to 10^7 examples, and what its beginning takes of it.
* steps: the memory and the programs of the process over 10^6 steps.
* fits: memory, threads, files, arrays and programs over 1,000 calls of `fit`, of one model and of
  a new one each time.

A table for each section is printed as Markdown, and all values are written as JSON. It ends with
an error if something grew that must not: what was counted at a fifth of the steps or calls is
compared with the end.
"""

import argparse
import dataclasses
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import flaxfit as ff
from benchmarks import report
from benchmarks.measure import measure
from benchmarks.workloads import make

MIB = 2**20
_N_READINGS = 10
_MEMORY_SLACK = 16.0
"""MiB that allocator and interpreter may add after the first fifth."""
_UNFINISHED = 24
"""Arrays of unfinished dispatches."""
_CONSTANT = ("MiB", "threads", "files", "live arrays", "programs")
_RESTORE = "restored in "
_BY_HAND = ("hand-written", "hand-written, host-fed")


@dataclasses.dataclass
class Growth:
    """Measurements as the work grows: a row for each size."""

    section: str
    work: str
    """The unit of the sizes."""
    rows: list[dict[str, float]]
    """Values by name; the first is the size."""
    constant: Sequence[str] = ()
    """The names of values that must not grow."""

    def table(self) -> str:
        """A Markdown table."""
        names = list(self.rows[0])
        lines = [f"### {self.section}", "", f"| {' | '.join(names)} |", "| --: " * len(names) + "|"]
        lines += [f"| {' | '.join(_number(row[name]) for name in names)} |" for row in self.rows]
        return "\n".join(lines) + "\n"

    def problems(self) -> list[str]:
        """Describes what must not grow but did, between a fifth of the work and its end."""
        first = next(r for r in self.rows if r[self.work] >= self.rows[-1][self.work] / 5)
        last = self.rows[-1]
        slack = {"MiB": _MEMORY_SLACK, "live arrays": _UNFINISHED}
        return [
            f"{self.section}: {name} grew from {_number(first[name])} to {_number(last[name])}"
            for name in self.constant
            if last[name] > first[name] + slack.get(name, 0)
        ]


def arrays(quick: bool) -> Iterator[Growth]:
    """Measures the overhead of TrainLoop over the faster hand-written loop, by number of arrays."""
    rows = []
    for n in (10, 100) if quick else (10, 100, 1_000):
        (found,) = measure(
            make(f"leaves-{n}", quick),
            [*_BY_HAND, "TrainLoop, borrowed", "TrainLoop"],
            quantities=["step"],
            rounds=1 if quick else 5,
        )
        best = {name: min(values) for name, values in found.values.items()}
        ours, by_hand = best["TrainLoop, borrowed"], min(best[name] for name in _BY_HAND)
        rows.append(
            {
                "arrays": n,
                "us/step": ours,
                "with copies": best["TrainLoop"],  # A checkpoint each 16 steps copies all arrays.
                "by hand": by_hand,
                "overhead": ours - by_hand,
                "ns/array": (ours - by_hand) * 1e3 / n,
            }
        )
    yield Growth("Steps by the number of arrays", "arrays", rows)


def checkpoints(quick: bool) -> Iterator[Growth]:
    """Times saves: the wait of the training thread, and the whole save."""
    rows = []
    for n_bytes in (MIB, 2 * MIB) if quick else (MIB, 16 * MIB, 128 * MIB, 512 * MIB, 2048 * MIB):
        with tempfile.TemporaryDirectory() as folder:
            if n_bytes > min(_free_memory(), shutil.disk_usage(folder).free) / 4:
                print(f"Larger checkpoints are left out: {n_bytes // MIB:,} MiB are too much here.")
                break
            state = _state(n_bytes)
            checkpoint = ff.Checkpoint(step=0, state=state, metrics={})
            with ff.checkpoints.CheckpointFileWriter(folder) as save:
                save.save(checkpoint)  # Opens what the library needs.
                save.wait()
                start = time.perf_counter()
                save.save(checkpoint.replace(step=1))
                waited = time.perf_counter() - start
                save.wait()
                done = time.perf_counter() - start
        rows.append({"MiB": n_bytes // MIB, "ms until training": waited * 1e3, "s in all": done})
    yield Growth("Checkpoints by their size", "MiB", rows)


def restores(quick: bool) -> Iterator[Growth]:
    """Saves a state, and times restoring it onto more and more devices in separate processes."""
    rows, n_bytes = [], MIB if quick else 128 * MIB
    with tempfile.TemporaryDirectory() as folder:
        ff.checkpoints.save(folder, _state(n_bytes))
        for n in (1, 8) if quick else (1, 2, 4, 8):
            command = [sys.executable, "-m", "benchmarks.growth"]
            command += ["--restore", folder, str(n_bytes), str(n)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            seconds = float(done.stdout.rpartition(_RESTORE)[2])
            rows.append({"devices": n, "MiB": n_bytes // MIB, "s": seconds})
    yield Growth("Restores by the number of devices", "devices", rows)


def restore(folder: str, n_bytes: int, n_devices: int) -> None:
    """Restores a state onto simulated devices; prints the time of the second restore."""
    jax.config.update("jax_num_cpu_devices", n_devices)
    strategy = ff.Sharded.fsdp()
    shapes = jax.eval_shape(lambda: _state(n_bytes))
    places = strategy.shardings(shapes)
    target = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        places,
    )
    seconds = 0.0
    for _ in range(2):  # The first compiles.
        start = time.perf_counter()
        jax.block_until_ready(ff.checkpoints.restore(folder, target).params)
        seconds = time.perf_counter() - start
    print(f"{_RESTORE}{seconds}")


def epochs(quick: bool) -> Iterator[Growth]:
    """Times shuffled epochs of small examples in batches of 1,000."""
    rows, batch_size = [], 100 if quick else 1_000
    for n in (1_000, 10_000) if quick else (1_000, 10_000, 100_000, 1_000_000, 10_000_000):
        x = np.ones((n, 1), np.float32)
        stream = ff.ArrayStream(x, x, batch_size=batch_size, shuffle=True)
        n_steps = n // batch_size
        loop = _loop(stream, n_steps_per_checkpoint=n_steps, first_checkpoint=n_steps)
        loop.next_checkpoint()  # Compiles.
        seconds, first = [], []
        for _ in range(1 if quick else 3):
            start = time.perf_counter()
            loop.next_step()
            first.append(time.perf_counter() - start)
            loop.next_checkpoint()
            seconds.append(time.perf_counter() - start)
        us = min(seconds) / n_steps * 1e6
        rows.append(
            {"examples": n, "s": min(seconds), "us/step": us, "ms first step": min(first) * 1e3}
        )
    yield Growth("Epochs by the number of examples", "examples", rows)


def steps(quick: bool) -> Iterator[Growth]:
    """Reads the memory over steps of a tiny model, at its checkpoints."""
    n = 1_000 if quick else 1_000_000
    x = np.ones((64, 1), np.float32)
    spacing = n // _N_READINGS
    stream = ff.ArrayStream(x, x, batch_size=8, shuffle=True, epochs=None)
    loop = _loop(stream, n_steps_per_checkpoint=spacing, first_checkpoint=spacing)
    read = _Reading()
    rows = [{"steps": loop.step, **read()} for _ in loop.run(n)]
    yield Growth("Memory over the steps of a run", "steps", rows, _CONSTANT)


def fits(quick: bool) -> Iterator[Growth]:
    """Reads the memory over calls of `fit`, with validation and a history."""
    n_warm, n = (5, 10) if quick else (40, 1_000)
    x = np.ones((32, 2), np.float32)
    folder = tempfile.TemporaryDirectory()

    def new() -> ff.Model:
        return ff.Model(
            nn.Dense(1), optax.sgd(0.1), "mse", metrics=["mae"], compilation_cache=folder.name
        )

    def fit(model: ff.Model) -> None:
        model.fit(x, x[:, :1], batch_size=8, validation_data=(x, x[:, :1]), verbose=0)

    one = new()
    contenders: dict[str, Callable[[], None]] = {
        "Calls of fit of one model": lambda: fit(one),
        "Calls of fit of new models": lambda: fit(new()),
    }
    for name, call in contenders.items():
        for _ in range(n_warm):
            call()  # Fills what is bounded, such as the results in flight.
        read, rows = _Reading(), []
        for i in range(1, n + 1):
            call()
            if i % (n // _N_READINGS) == 0:
                rows.append({"calls": i, **read()})
        yield Growth(name, "calls", rows, _CONSTANT)


SECTIONS: dict[str, Callable[[bool], Iterator[Growth]]] = {
    each.__name__: each for each in (arrays, checkpoints, restores, epochs, steps, fits)
}


class _Reading:
    """Reads the resources of this process; programs are those compiled since the first reading.

    Those that are read from the compilation cache do not count.
    """

    def __init__(self) -> None:
        self._n_programs = 0
        jax.monitoring.register_event_duration_secs_listener(self._count)
        jax.monitoring.register_event_listener(self._uncount)

    def _count(self, event: str, seconds: float, **facts: object) -> None:
        self._n_programs += event == "/jax/core/compile/backend_compile_duration"

    def _uncount(self, event: str, **facts: object) -> None:
        self._n_programs -= event == "/jax/compilation_cache/cache_hits"

    def __call__(self) -> dict[str, float]:
        gc.collect()
        return {
            "MiB": _resident_mebibytes(),
            "threads": _n_entries("/proc/self/task", threading.active_count()),
            "files": _n_entries("/proc/self/fd", 0),
            "live arrays": len(jax.live_arrays()),
            "programs": self._n_programs,
        }


def _loop(data: ff.ArrayStream, **options: object) -> ff.TrainLoop:
    module = nn.Dense(1)
    task = ff.TrainTask(module.apply, optax.sgd(1e-3), "mse", data)
    return ff.TrainLoop(module.init, task, 0, devices=jax.devices()[:1], stdout=False, **options)


def _state(n_bytes: int) -> ff.TrainState:
    """A state of arrays of 1 MiB."""
    params = {f"{i:04}": jnp.full((512, 512), i, jnp.float32) for i in range(n_bytes // MIB)}
    return ff.TrainState.create(optax.sgd(0.1), {"params": params})


def _free_memory() -> float:
    """Returns the available memory in bytes; infinity where /proc does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024


def _resident_mebibytes() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def _n_entries(folder: str, otherwise: int) -> int:
    return len(os.listdir(folder)) if os.path.isdir(folder) else otherwise


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables of the sections, and writes their values."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=[*SECTIONS])
    parser.add_argument("--quick", action="store_true", help="small sizes: only whether it works")
    parser.add_argument("--output", default="growth.json", metavar="FILE")
    parser.add_argument("--restore", nargs=3, help=argparse.SUPPRESS)
    settings = parser.parse_args(arguments)
    if settings.restore:
        folder, n_bytes, n_devices = settings.restore
        return restore(folder, int(n_bytes), int(n_devices))
    found = []
    for name in settings.sections:
        for growth in SECTIONS[name](settings.quick):
            print(growth.table(), flush=True)
            found.append(growth)
    content = {
        "environment": report.environment(),
        "settings": {"quick": settings.quick, "sections": settings.sections},
        "growth": [dataclasses.asdict(growth) for growth in found],
    }
    Path(settings.output).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if problems := [problem for growth in found for problem in growth.problems()]:
        raise SystemExit("\n".join(problems))
    return None


if __name__ == "__main__":
    main()
