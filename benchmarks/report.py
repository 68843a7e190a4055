"""Reports measurements as Markdown tables and as JSON."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.measure import Measurement

_OURS = ("flaxfit", "jax", "jaxlib", "flax", "optax", "numpy")
_PACKAGES = (*_OURS, "keras", "torch", "lightning", "kauldron")


def table(measurement: Measurement) -> str:
    """A Markdown table, with the ratios to the best hand-written loop and to Keras."""
    title = f"{measurement.model}: {measurement.quantity}"
    if measurement.n_devices > 1:
        title += f", {measurement.n_devices} devices"
    lines = [
        f"### {title}",
        "",
        f"| contender | {measurement.unit} | least | x best hand-written | between | x Keras |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for name, values in measurement.values.items():
        best = measurement.best(name)
        to_best, to_keras = (measurement.ratio(name, base) for base in (best, "Keras"))
        bounds = measurement.bounds(name, best)
        cells = [
            name,
            _number(statistics.median(values)),
            _number(min(values)),
            "" if to_best is None else f"{to_best:.2f}",
            "" if bounds is None else "{:.2f} to {:.2f}".format(*bounds),
            "" if to_keras is None else f"{to_keras:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write(
    path: str | os.PathLike[str], measurements: Iterable[Measurement], **settings: Any
) -> None:
    """Writes all values of all rounds, with the machine and the versions."""
    content = {
        "environment": environment(),
        "settings": settings,
        "measurements": [dataclasses.asdict(measurement) for measurement in measurements],
    }
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read(path: str | os.PathLike[str]) -> list[Measurement]:
    """Reads the measurements in a file."""
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    return [Measurement(**fields) for fields in content["measurements"]]


def environment() -> dict[str, Any]:
    """Returns facts about the machine, and the versions."""
    import jax

    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "n_cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "versions": versions,
    }


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
