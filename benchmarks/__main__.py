"""The command line: what flaxfit costs beside what it is compared with.

    python -m benchmarks [--quick] [--models mlp cnn] [--rivals "hand-written" Keras] [--rounds 9]

Every figure to quote is a median of ratios: contenders take turns in the same process, in an order
drawn anew each round. Where parameters, losses or predictions disagree there is no figure at all.
Rivals that are not installed are left out: `pip install keras torch lightning`.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks import fresh, report
from benchmarks.contenders import RECIPES, installed
from benchmarks.measure import QUANTITIES, Measurement, check_losses, measure
from benchmarks.workloads import MODELS, make

ALL = (*QUANTITIES, "start", "leaves", "devices")


def main(arguments: list[str] | None = None) -> None:
    """Measures what was asked for, prints tables and writes a JSON file."""
    settings = _parse(arguments)
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
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--leaves", nargs="+", type=int, default=[10, 100, 500, 2000])
    parser.add_argument("--devices", type=int, default=1, help="simulate so many on a CPU")
    parser.add_argument("--output", default="benchmarks.json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="tiny models: only whether it works")
    settings = parser.parse_args(arguments)
    for name in [name for name in settings.rivals if not installed(name)]:
        print(f"{name} is left out: {RECIPES[name].needs} is not installed.")
        settings.rivals.remove(name)
    return settings


def _measurements(settings: argparse.Namespace) -> Iterator[Measurement]:
    rounds, quick = settings.rounds, settings.quick
    in_process = [quantity for quantity in QUANTITIES if quantity in settings.quantities]
    for model in settings.models if in_process else []:
        yield from measure(
            make(model, quick),
            settings.rivals,
            quantities=in_process,
            rounds=rounds,
            n_devices=settings.devices,
        )
    if "start" in settings.quantities:
        for model in settings.models:
            yield from _from_start(model, settings)
    if "leaves" in settings.quantities:
        for n_leaves in settings.leaves[: 1 if quick else None]:
            yield from measure(
                make(f"leaves-{n_leaves}", quick),
                settings.rivals,
                quantities=["step"],
                rounds=rounds,
            )
    if "devices" in settings.quantities:
        for n_devices in (2, 4):
            yield from _on_devices(n_devices, settings)


def _from_start(model: str, settings: argparse.Namespace) -> Iterator[Measurement]:
    names = [name for name in settings.rivals if not RECIPES[name].is_scan]
    rounds = min(settings.rounds, 5)
    found = fresh.measure(model, names, rounds=rounds, quick=settings.quick)
    losses = found.pop("losses")
    check_losses(losses, fresh.LOSS_TOLERANCE)
    for quantity, values in found.items():
        unit = "MiB" if quantity == "memory" else "s"
        yield Measurement(model, quantity, unit, values, losses)


def _on_devices(n_devices: int, settings: argparse.Namespace) -> list[Measurement]:
    """The time per step in a process of its own, which has that many devices."""
    names = [name for name in settings.rivals if RECIPES[name].spreads]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "benchmarks.json"
        command: list[Any] = [sys.executable, "-m", "benchmarks", "--quantities", "step"]
        command += ["--devices", n_devices, "--rounds", settings.rounds, "--output", output]
        command += ["--models", *settings.models, "--rivals", *names]
        command += ["--quick"] * settings.quick
        subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
        return report.read(output)


if __name__ == "__main__":
    main()
