"""Figures: contenders relative to a hand-written loop, in common rounds."""

import functools
import gc
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import flaxfit as ff
from benchmarks.accelerator import idle, loops
from benchmarks.accelerator.jobs import JOBS, Job
from benchmarks.contenders import Contender, unseen_terminal
from benchmarks.fresh import peak_mebibytes
from benchmarks.linen_models import initial_params
from benchmarks.turns import around_median, take_turns
from flaxfit import checkpoints

# Whether the same was trained: Keras places the epsilon of Adam elsewhere, and torch keeps other
# operations of a bfloat16 network in float32.
_SAME_LOSS = {None: 5e-3, "bfloat16": 2e-2}
_BLOCK_SECONDS, _MOST_ROUNDS, _LEAST_FOR_BOUNDS = 0.2, 20, 6
SPIKE = 0.02
"""Seconds of an occasional delay of the loader."""

Emit = Callable[..., None]


class Clock:
    """The time that a part has left."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()


def pair(
    emit: Emit, base: tuple[str, Callable[[], Any]], name: str, run: Callable[[], Any], **more: Any
) -> float:
    """Times a function and a base in turns, emits the figures, and returns the ratio.

    Args:
      more: `seconds` for both, `n` units in a call, and what the row is to say.
    """
    seconds, n = more.pop("seconds"), more.pop("n", 1)
    began = time.perf_counter()
    base[1]()
    run()
    once = time.perf_counter() - began
    rounds = max(1, min(_MOST_ROUNDS, int(seconds / once) - 2))
    times, _ = take_turns({"base": base[1], "rival": run}, rounds, n)
    ratios = [a / b for a, b in zip(times["rival"], times["base"], strict=True)]
    found = statistics.median(ratios)
    bounds = around_median(ratios) if rounds >= _LEAST_FOR_BOUNDS else None
    values = {"value": times["rival"], "base_value": times["base"]}
    medians = {key: statistics.median(value) for key, value in values.items()}
    emit(name=name, base=base[0], ratio=found, bounds=bounds, rounds=rounds, **medians, **more)
    return found


class Rivals:
    """Contenders on a job, all relative to one base and from the same parameters."""

    def __init__(self, emit: Emit, job: Job, quick: bool, clock: Clock):
        self._emit, self.job, self._quick, self._clock = emit, job, quick, clock
        self.params = initial_params(job)
        self._longest = 0.0

    def set_base(self, name: str, make: loops.Make) -> None:
        """Makes the base contender."""
        began = time.monotonic()
        self.name, self.base = name, make(self.job, self.params)
        self.loss, self.count = self.base.train(1), self.base.count()
        self._longest = max(self._longest, time.monotonic() - began)
        began = time.perf_counter()
        self.base.train(1)
        block = 0 if self._quick else _BLOCK_SECONDS
        self.epochs = max(1, math.ceil(block / (time.perf_counter() - began)))

    def take_best_base(self, makes: dict[str, loops.Make], seconds: float) -> None:
        """Makes the fastest of several the base."""
        (first, make), *others = makes.items()
        self.set_base(first, make)
        best, least = first, 1.0
        for name, make in others:
            found = self.add(name, make, seconds)
            if found is not None and found < least:
                best, least = name, found
        if best != first:
            self.set_base(best, makes[best])

    def add(
        self, name: str, make: loops.Make, seconds: float, *, is_foreign: bool = False, **more: Any
    ) -> float | None:
        """Emits the row of a contender; a foreign one may fail, with the reason in the row."""
        gc.collect()
        began = time.monotonic()
        try:
            contender = make(self.job, self.params)
            loss, n = contender.train(1), contender.count()
            if n != self.count:
                raise ValueError(f"{n:,} parameters, not {self.count:,}")
            if not abs(loss / self.loss - 1) <= _SAME_LOSS[self.job.precision]:
                raise ValueError(f"another loss: {loss:.5f}, not {self.loss:.5f}")
        except Exception as error:
            if not is_foreign:
                raise
            self._emit(name=name, base=self.name, left_out=_reason(error), **more)
            return None
        self._longest = max(self._longest, time.monotonic() - began)
        base, epochs = self.base, self.epochs
        return pair(
            self._emit,
            (self.name, lambda: base.train(epochs)),
            name,
            lambda: contender.train(epochs),
            seconds=min(seconds - (time.monotonic() - began), self._clock.left()),
            n=epochs * self.job.n_steps,
            unit="us per step",
            **more,
        )

    def add_foreign(self, name: str, needs: str, make: loops.Make, seconds: float) -> None:
        """Adds a rival of another library, if it is installed and time is left."""
        if find_spec(needs) is None:
            reason = "not installed"
        elif not self._quick and self._clock.left() < max(self._longest, seconds / 2):
            reason = "no time left"
        else:
            self.add(name, make, seconds, is_foreign=True)
            return
        self._emit(name=name, base=self.name, left_out=reason)


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]


def _of_scan(**options: Any) -> loops.Make:
    return functools.partial(loops.hand_written, per_call=32, **options)


BY_HAND: dict[str, loops.Make] = {
    "hand-written": loops.hand_written,
    "hand-written, resident": functools.partial(loops.hand_written, resident=True),
}


def steps(emit: Emit, name: str, quick: bool, clock: Clock) -> None:
    """A step of each contender."""
    share = clock.left() / 7
    rivals = Rivals(emit, JOBS[name](quick), quick, clock)
    if name == "transformer":  # Its batches are small, and it takes long to compile.
        rivals.set_base("hand-written", loops.hand_written)
    else:
        rivals.take_best_base(BY_HAND, share)
    rivals.add("TrainLoop", loops.train_loop, share)
    rivals.add("Model.fit", loops.fit, share)
    with unseen_terminal():
        rivals.add_foreign("torch", "torch", loops.torch, share)
        rivals.add_foreign("Keras on JAX", "keras", loops.keras, share)
        if quick:
            emit(name="torch.compile", base=rivals.name, left_out="takes too long for --quick")
        else:
            compiled = functools.partial(loops.torch, compiled=True)
            rivals.add_foreign("torch.compile", "torch", compiled, share)


def calls(emit: Emit, name: str, quick: bool, clock: Clock) -> None:
    """Several steps per call relative to the best hand-written scan, and both forms of a step."""
    share = clock.left() / 8
    rivals = Rivals(emit, JOBS["mlp"](quick), quick, clock)
    scans = {
        "hand-written scan of 32": _of_scan(),
        "hand-written scan of 32, resident": _of_scan(resident=True),
    }
    rivals.take_best_base(scans, share)
    rivals.add("hand-written, 1 a call", loops.hand_written, share)
    for n in (1, 32, "auto"):
        make = functools.partial(loops.train_loop, steps_per_call=n)
        rivals.add(f"TrainLoop, steps_per_call={n!r}", make, share)
    rivals.set_base("hand-written", loops.hand_written)
    for name in ("pmap", "shard_map"):
        make = functools.partial(loops.train_loop, implementation=name)
        rivals.add(f"TrainLoop, {name}", make, share)


def data(emit: Emit, name: str, quick: bool, clock: Clock) -> None:
    """Host data, batches already on the device, and resident data."""
    share = clock.left() / 5
    rivals = Rivals(emit, job := JOBS["cnn"](quick), quick, clock)
    fed = functools.partial(loops.train_loop, resident=False)
    rivals.set_base("hand-written", loops.hand_written)
    rivals.add("TrainLoop, host-fed", fed, share)
    rivals.add("TrainLoop, host-fed, prefetch", functools.partial(fed, prefetch=4), share)
    ahead = loops.put_ahead(Batches(job), jax.devices()[0])
    rivals.add("TrainLoop, put ahead", functools.partial(loops.train_loop, data=ahead), share)
    rivals.set_base("hand-written, resident", BY_HAND["hand-written, resident"])
    resident = functools.partial(loops.train_loop, resident=True)
    rivals.add("TrainLoop, resident", resident, share)


class Batches:
    """Endless batches; one of every so many takes 20 ms."""

    def __init__(self, job: Job, every: int = 0):
        self._job, self._every = job, every

    def __iter__(self) -> Iterator[Any]:
        job, n = self._job, 0
        while True:
            for start in range(0, len(job.x), job.batch_size):
                n += 1
                if self._every and n % self._every == 0:
                    time.sleep(SPIKE)
                rows = slice(start, start + job.batch_size)
                yield job.x[rows], job.y[rows]


def loader(emit: Emit, name: str, quick: bool, clock: Clock) -> None:
    """A loader with occasional delays of 20 ms, on average half as long as the steps between."""
    share = clock.left() / 5
    rivals = Rivals(emit, job := JOBS["cnn"](quick), quick, clock)
    rivals.set_base("hand-written, no spikes", loops.hand_written)
    began = time.perf_counter()
    rivals.base.train(1)
    step = (time.perf_counter() - began) / job.n_steps
    ahead = min(256, math.ceil(SPIKE / step) + 1)
    emit(note=f"20 ms each {2 * ahead} batches, at most {ahead} read ahead")
    spiky = Batches(job, 2 * ahead)

    def by_hand(job: Job, params: Any, n: int = 0) -> Contender:
        batches = loops.read_ahead(spiky, n) if n else spiky
        return loops.hand_written(job, params, data=batches)

    ours = functools.partial(loops.train_loop, data=spiky)
    rivals.add("hand-written", by_hand, share)
    rivals.add("hand-written, read ahead", functools.partial(by_hand, n=ahead), share)
    rivals.add("TrainLoop", ours, share)
    rivals.add("TrainLoop, prefetch", functools.partial(ours, prefetch=ahead), share)


def saving(emit: Emit, name: str, quick: bool, clock: Clock) -> None:
    """Copies and files of a state with the arrays of the transformer and of Adam."""
    job, seconds = JOBS["transformer"](quick), clock.left() / 5
    params, optimizer = initial_params(job), optax.adam(1e-3)
    given = ff.TrainState.create(optimizer, {"params": {**params, "scale": np.ones(())}})

    def apply(variables: Any, x: Any, **options: Any) -> Any:  # No step is taken.
        outputs = x * variables["params"]["scale"]
        return (outputs, {}) if "mutable" in options else outputs

    rows = np.ones((8, 1), np.float32)
    task = ff.TrainTask(apply, optimizer, "mse", (rows, rows))
    options = {"devices": jax.devices()[:1], "stdout": False}
    loop = ff.TrainLoop(given, task, **options)
    to_host = ff.TrainLoop(given, task, snapshot="host", **options)
    state = loop.state
    arrays = [leaf for leaf in jax.tree.leaves(state.replace(key=()))]
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
    emit(note=f"a state of {sum(a.nbytes for a in arrays) / 1e6:,.1f} MB, {len(arrays)} arrays")

    def save(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # Files of the same arrays are not written again.
        checkpoints.save(folder, state)

    def by_hand(file: Path) -> None:  # Without digests, and without waiting for the disk.
        with file.open("wb") as opened:
            for array in jax.device_get(arrays):
                np.save(opened, array)

    def read_by_hand(file: Path) -> None:
        with file.open("rb") as opened:
            read = [np.load(opened) for _ in arrays]
        jax.block_until_ready(jax.device_put(read, jax.devices()[0]))

    with tempfile.TemporaryDirectory() as folder:
        file, ours = Path(folder, "by_hand.npy"), Path(folder, "ours")
        pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "copy on the device": (
                lambda: jax.block_until_ready(copy(arrays)),
                lambda: jax.block_until_ready(loop.state),
            ),
            "copy to the host": (
                lambda: [np.array(array) for array in arrays],
                lambda: to_host.state,
            ),
            "save": (lambda: by_hand(file), lambda: save(ours)),
            "restore": (
                lambda: read_by_hand(file),
                lambda: jax.block_until_ready(checkpoints.restore(ours, state)),
            ),
        }
        for name, (theirs, run) in pairs.items():
            options = {"seconds": min(seconds, clock.left()), "unit": "us"}
            pair(emit, ("hand-written", theirs), name, run, **options)


MEMORY: dict[str, loops.Make] = {
    "hand-written": loops.hand_written,
    "TrainLoop": loops.train_loop,
    "TrainLoop, snapshot='none'": functools.partial(loops.train_loop, snapshot="none"),
}


def memory(emit: Emit, name: str, quick: bool, clock: Clock) -> None:
    """The peak memory of a process that trains the transformer for two epochs."""
    job = JOBS["transformer"](quick)
    MEMORY[name](job, initial_params(job)).train(2)
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        emit(name=name, value=stats["peak_bytes_in_use"] / 2**20, unit="MiB on the device")
    else:
        emit(name=name, value=peak_mebibytes(), unit="MiB of the process")


def trace(emit: Emit, name: str, quick: bool, clock: Clock) -> None:
    """The idle time of the device in an epoch, by JAX's profiler."""
    job = JOBS[name](quick)
    fed = functools.partial(loops.train_loop, resident=False)
    makes: dict[str, loops.Make] = {  # Those first that other parts have compiled.
        "hand-written": loops.hand_written,
        "TrainLoop, resident": functools.partial(loops.train_loop, resident=True),
        "TrainLoop, host-fed": fed,
        "TrainLoop, host-fed, prefetch": functools.partial(fed, prefetch=4),
        "hand-written, resident": BY_HAND["hand-written, resident"],
    }
    params, longest = initial_params(job), 0.0
    for name, make in [*makes.items()][: 2 if quick else None]:
        began = time.monotonic()
        if not quick and clock.left() < longest:
            emit(note=f"{name}: no time left")
            continue
        contender = make(job, params)
        contender.train(2)
        try:
            found = idle.trace(functools.partial(contender.train, 2))
        except ValueError as error:  # A user may not be allowed to trace a GPU.
            emit(note=f"{name}: {error}")
        else:
            emit(name=name, **vars(found))
        longest = max(longest, time.monotonic() - began)
