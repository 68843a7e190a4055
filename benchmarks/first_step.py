"""From the start of a process to its first finished step, beside a hand-written script.

    python -m benchmarks.first_step [--quick] [--rounds 5] [--models mlp ...]

Each start is a process of its own, in turn: without a compilation cache, and with one that an
earlier process has filled. Tracing, lowering and compiling are what JAX reports of itself, in
seconds; compiling includes the reading of a cache, and `programs` is how many were compiled. The
least of all rounds counts, and ratios are those of the least: a busy machine only ever adds time.
"""

import argparse
import collections
import dataclasses
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

BASE, RIVALS = "hand-written", ("TrainLoop", "Model.fit")
PARTS = {
    "jaxpr_trace_duration": "tracing",
    "jaxpr_to_mlir_module_duration": "lowering",
    "backend_compile_duration": "compiling",
}


def transformer(quick: bool) -> Workload:
    """48 layers that are written out."""
    workload = workloads.transformer(quick=True)
    return dataclasses.replace(workload, sizes=(16, 3 if quick else 48, 2, 8))


def resnet(quick: bool) -> Workload:
    """ResNet-50, with groups in place of batch statistics, on images of noise."""
    blocks, width, size = ((1, 1), 8, 8) if quick else ((3, 4, 6, 3), 64, 64)
    return workloads.images(4, size, (width, *blocks))


MODELS = {"mlp": workloads.mlp, "transformer": transformer, "resnet": resnet}


def main(arguments: list[str] | None = None) -> None:
    """Prints a table, or trains one step where that is asked of a child."""
    parser = argparse.ArgumentParser("python -m benchmarks.first_step", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small models, one round")
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    settings = parser.parse_args(arguments)
    if settings.child:
        _train(settings.child, MODELS[settings.models[0]](settings.quick))
    for model in settings.models:
        for line in _compared(model, 1 if settings.quick else settings.rounds, settings.quick):
            print(line, flush=True)


def _compared(model: str, rounds: int, quick: bool) -> Iterator[str]:
    names = (BASE, *RIVALS)
    least: dict[tuple[bool, str], dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: os.path.join(folder, name) for name in names}
        # The first with a cache fills it.
        for i, is_warm, name in itertools.product(range(rounds + 1), (False, True), names):
            found = _start(name, model, caches[name] if is_warm else None, quick)
            if i:
                best = least.setdefault((is_warm, name), found)
                best |= {each: min(best[each], value) for each, value in found.items()}
    for is_warm in (False, True):
        yield f"{model}, {'warm' if is_warm else 'no'} cache"
        base = least[is_warm, BASE]["seconds"]
        for name in names:
            found = least[is_warm, name]
            parts = ", ".join(f"{part} {found[part]:.2f}" for part in PARTS.values())
            yield (
                f"  {name:13} {found['seconds']:6.2f} s  {found['seconds'] / base:5.2f} x  "
                f"{parts}, programs {found['programs']:.0f}"
            )


def _start(name: str, model: str, cache: str | None, quick: bool) -> dict[str, float]:
    """Starts a process that trains one step; returns what it took."""
    settings: dict[str, str] = {"FLAXFIT_COMPILATION_CACHE": "off"}
    if cache is not None and name == BASE:
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
        [*command, *["--quick"] * quick],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**own, **settings},
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return found | {"seconds": found.pop("time") - began}


def _train(name: str, workload: Workload) -> None:
    """Trains one step, prints what it took, and ends the process."""
    took: dict[str, Any] = collections.Counter(dict.fromkeys((*PARTS.values(), "programs"), 0))

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
        contenders.make(name, workload.cut(1)).train(1)
        done = time.time()
    print(json.dumps({**took, "time": done}), flush=True)
    os._exit(0)  # What libraries do at their exit is not measured.


if __name__ == "__main__":
    main()
