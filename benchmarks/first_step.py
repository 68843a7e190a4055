"""Time from process start to the first finished step, relative to a hand-written script.

    python -m benchmarks.first_step [--quick] [--rounds 5] [--models mlp ...]
        [--contenders TrainLoop ...] [--caches no warm] [--epochs 714] [--devices 4]

Each start is a process of its own, in turn: without a compilation cache, and with one that an
earlier process has filled. `cpu` is the processor time of all threads, which other programs disturb
less than the time that passes. Tracing, lowering and compiling are what JAX reports of itself, in
seconds; compiling includes the reading of a cache, and `programs` is how many were compiled. The
least of all rounds counts, and ratios are those of the least, to the first contender: a busy
machine only ever adds time. With `--epochs` it trains these instead of one step; `training` leaves
out the start of Python and imports. On one device nothing is divided, and batches may be padded
only with a rest, a last batch of half the size. This measures 20,000 steps of `fit`, compiling
included:

    python -m benchmarks.first_step --models mlp --caches no --epochs 714
        --contenders "hand-written, with a bar" "Model.fit, auto"
"""

import argparse
import dataclasses
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import contenders, workloads
from benchmarks.workloads import Workload

BASE = "hand-written"
NAMES = BASE, "TrainLoop", "Model.fit"
OTHERS = "hand-written, with a bar", "hand-written, 32 a call", "Model.fit, auto"
OTHERS += ("TrainLoop, with a rest",)
CACHES = "no", "warm"
PARTS = {
    "jaxpr_trace_duration": "tracing",
    "jaxpr_to_mlir_module_duration": "lowering",
    "backend_compile_duration": "compiling",
}


def transformer(quick: bool) -> Workload:
    """48 layers, unrolled."""
    workload = workloads.transformer(quick=True)
    return dataclasses.replace(workload, sizes=(16, 3 if quick else 48, 2, 8))


def resnet(quick: bool) -> Workload:
    """ResNet-50 with group normalization, on images of noise."""
    blocks, width, size = ((1, 1), 8, 8) if quick else ((3, 4, 6, 3), 64, 64)
    return workloads.images(4, size, (width, *blocks))


MODELS = {"mlp": workloads.mlp, "transformer": transformer, "resnet": resnet}


def main(arguments: list[str] | None = None) -> None:
    """Prints a table, or as a child process trains one step."""
    parser = argparse.ArgumentParser("python -m benchmarks.first_step", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--contenders", nargs="+", default=list(NAMES), choices=NAMES + OTHERS)
    parser.add_argument("--caches", nargs="+", default=list(CACHES), choices=CACHES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=0, help="to train; 0: a single step")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small models, one round")
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    settings = parser.parse_args(arguments)
    if settings.child:
        workload = MODELS[settings.models[0]](settings.quick)
        _train(settings.child, workload, settings.epochs, settings.devices)
    rounds = 1 if settings.quick else settings.rounds
    options = ["--epochs", str(settings.epochs), "--devices", str(settings.devices)]
    options += ["--quick"] * settings.quick
    for model in settings.models:
        for line in _compared(model, settings.contenders, settings.caches, rounds, options):
            print(line, flush=True)


def _compared(
    model: str, names: list[str], caches: list[str], rounds: int, options: list[str]
) -> Iterator[str]:
    least: dict[tuple[str, str], dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, cache, name in itertools.product(range(rounds + 1), caches, names):
            is_warm = cache == "warm"
            if not i and not is_warm:  # The first with a cache fills it.
                continue
            found = _start(name, model, os.path.join(folder, name) if is_warm else None, options)
            if i:
                best = least.setdefault((cache, name), found)
                best |= {each: min(best[each], value) for each, value in found.items()}
    for cache in caches:
        yield f"{model}, {cache} cache"
        base = least[cache, names[0]]
        for name in names:
            found = least[cache, name]
            times = ", ".join(
                f"{each} {found[each]:6.2f} {found[each] / base[each]:5.2f} x"
                for each in ("seconds", "cpu", "training")
            )
            parts = ", ".join(f"{part} {found[part]:.2f}" for part in PARTS.values())
            yield f"  {name:24} {times}, {parts}, programs {found['programs']:.0f}"


def _start(name: str, model: str, cache: str | None, options: list[str]) -> dict[str, float]:
    """Starts a training process; returns its times."""
    settings: dict[str, str] = {"FLAXFIT_COMPILATION_CACHE": "off"}
    if cache is not None and name.startswith(BASE):
        settings = {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
    elif cache is not None:
        settings = {"XDG_CACHE_HOME": cache, "FLAXFIT_COMPILATION_CACHE": "auto"}
    own = {key: each for key, each in os.environ.items() if "COMPILATION_CACHE" not in key}
    command = [sys.executable, "-m", "benchmarks.first_step", "--child", name, "--models", model]
    began = time.time()
    done = subprocess.run(
        [*command, *options],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**own, **settings},
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return found | {"seconds": found.pop("time") - began}


def _train(name: str, workload: Workload, epochs: int, n_devices: int) -> None:
    """Trains these epochs, or one step; prints the times, and ends the process."""
    jax.config.update("jax_num_cpu_devices", n_devices)
    importlib.import_module(contenders.RECIPES[name].maker.partition(":")[0])
    took: dict[str, Any] = dict.fromkeys((*PARTS.values(), "programs"), 0)

    def hear(event: str, seconds: float, **_: Any) -> None:
        part = PARTS.get(event.rsplit("/", 1)[-1])
        if part is not None:
            took[part] += seconds
        took["programs"] += part == "compiling"

    def count(event: str, **_: Any) -> None:
        took["programs"] -= event.endswith("/cache_hits")

    jax.monitoring.register_event_duration_secs_listener(hear)
    jax.monitoring.register_event_listener(count)
    with contenders.unseen_terminal():
        began = time.perf_counter()
        workload = workload if epochs else workload.cut(1)
        contenders.make(name, workload, n_devices=n_devices).train(epochs or 1)
        took |= {"time": time.time(), "cpu": time.process_time()}
        took["training"] = time.perf_counter() - began
    print(json.dumps(took), flush=True)
    os._exit(0)  # What libraries do at their exit is not measured.


if __name__ == "__main__":
    main()
