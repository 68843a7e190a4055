"""The command line: the cost of flaxfit relative to other libraries and hand-written loops.

    python -m benchmarks [--quick] [--models mlp cnn] [--rivals "hand-written" Keras] [--rounds 9]
                         [--processes 1]

Every figure to quote is a median of ratios: contenders take turns in the same process, in an order
newly drawn each round. Where parameters, losses or predictions disagree there is no figure at all.
Ratios are to the fastest hand-written loop that takes as many steps a call. Beside them stands
where that median lies with 95 % certainty, for the processes that were run: with more rounds that
narrows down, and with more processes, as the memory that one happens to get counts, too.
Rivals that are not installed are left out: `pip install keras torch lightning`.
"""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks import fresh, report
from benchmarks.contenders import RECIPES, installed, trains
from benchmarks.measure import QUANTITIES, Measurement, check_losses, measure, pooled
from benchmarks.workloads import MODELS, make

ALL = (*QUANTITIES, "start", "leaves", "devices")


def main(arguments: list[str] | None = None) -> None:
    """Measures the selected quantities, prints tables and writes a JSON file."""
    settings = _parse(arguments)
    # On a GPU the processes of a run share its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax.config.update("jax_num_cpu_devices", settings.devices)
    measurements = []
    for measurement in _measurements(settings):
        measurements.append(measurement)
        print(report.table(measurement), flush=True)
        report.write(settings.output, measurements, **vars(settings))
    print(f"All values of all rounds are in {settings.output}.")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rivals", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--quantities", nargs="+", default=list(ALL), choices=ALL)
    parser.add_argument("--rounds", type=_whole, help="in each process; 9, or 1 with --quick")
    processes = "one after the other, for what is measured in turn: all but --quantities start"
    parser.add_argument("--processes", type=_whole, default=1, help=processes)
    parser.add_argument("--leaves", nargs="+", type=_whole, default=[10, 100, 500, 2000])
    devices = "train, evaluate and predict on so many, simulated on a CPU"
    parser.add_argument("--devices", type=_whole, default=1, help=devices)
    parser.add_argument("--output", default="benchmarks.json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="tiny models: only whether it works")
    settings = parser.parse_args(arguments)
    settings.rounds = settings.rounds or (1 if settings.quick else 9)
    for name in [name for name in settings.rivals if not installed(name)]:
        print(f"{name} is left out: {RECIPES[name].needs} is not installed.")
        settings.rivals.remove(name)
    return settings


def _whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _measurements(settings: argparse.Namespace) -> Iterator[Measurement]:
    in_process = [quantity for quantity in QUANTITIES if quantity in settings.quantities]
    for model in settings.models if in_process else []:
        yield from _taking_turns(settings, model, in_process, settings.devices)
    if "start" in settings.quantities:
        for model in settings.models:
            yield from _from_start(model, settings)
    if "leaves" in settings.quantities:
        for n_leaves in settings.leaves[: 1 if settings.quick else None]:
            yield from _taking_turns(settings, f"leaves-{n_leaves}", ["step"], 1)
    if "devices" in settings.quantities:
        names = [name for name in settings.rivals if RECIPES[name].spreads]
        for n_devices, model in itertools.product((2, 4), settings.models):
            yield from _apart(settings, model, ["step"], names, n_devices)


def _taking_turns(
    settings: argparse.Namespace, model: str, quantities: list[str], n_devices: int
) -> list[Measurement]:
    if settings.processes > 1:
        return _apart(settings, model, quantities, settings.rivals, n_devices)
    workload, rounds = make(model, settings.quick), settings.rounds
    return measure(
        workload, settings.rivals, quantities=quantities, rounds=rounds, n_devices=n_devices
    )


def _from_start(model: str, settings: argparse.Namespace) -> Iterator[Measurement]:
    names = [n for n in settings.rivals if trains(n, model) and not RECIPES[n].is_scan]
    if not names:
        return
    rounds = min(settings.rounds, 5)
    found = fresh.measure(model, names, rounds=rounds, quick=settings.quick)
    losses = found.pop("losses")
    check_losses(losses, fresh.LOSS_TOLERANCE)
    for quantity, values in found.items():
        unit = "MiB" if quantity == "memory" else "s"
        yield Measurement(model, quantity, unit, values, losses)


def _apart(
    settings: argparse.Namespace,
    model: str,
    quantities: list[str],
    names: list[str],
    n_devices: int,
) -> list[Measurement]:
    """Measures contenders in turns, in separate processes, on that many devices."""
    if not names:
        return []
    command: list[Any] = [sys.executable, "-m", "benchmarks", "--rounds", settings.rounds]
    command += ["--devices", n_devices, "--rivals", *names, *["--quick"] * settings.quick]
    if model.startswith("leaves-"):
        command += ["--quantities", "leaves", "--leaves", model.removeprefix("leaves-")]
    else:
        command += ["--quantities", *quantities, "--models", model]
    found = []
    for _ in range(settings.processes):
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "benchmarks.json"
            whole = [str(part) for part in [*command, "--output", output]]
            code = subprocess.run(whole, stdout=subprocess.DEVNULL).returncode
            if code < 0:
                raise SystemExit(f"A process was ended by the signal {signal.Signals(-code).name}.")
            if code:
                raise SystemExit(code)  # It has said why.
            found.append(report.read(output))
    return [pooled(same) for same in zip(*found, strict=True)]


if __name__ == "__main__":
    main()
