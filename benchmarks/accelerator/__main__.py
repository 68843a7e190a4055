"""Correctness and speed on whatever accelerators JAX finds, in less than nine minutes.

    python -m benchmarks.accelerator [--out accelerator] [--sections correctness steps] [--quick]

First what flaxfit promises is checked on the device: a check that fails ends it with status 1. Then
contenders take turns beside hand-written loops, and each figure is the median of the ratios within
a round. Figures are of the first device. Rivals that are not installed, cannot use it, or come to
another loss are left out, with the reason: `pip install keras torch`. Without an accelerator it
runs its quick form. It writes accelerator.md and accelerator.json.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.accelerator import tables

SECONDS = 530
"""The limit of all parts together; each has its own limit, which few reach."""
PARTS = {
    "correctness:all": 95,
    "calls:mlp": 35,
    "data:cnn": 35,
    "loader:cnn": 25,
    "saving:transformer": 35,
    "memory:hand-written": 20,
    "memory:TrainLoop": 20,
    "memory:TrainLoop, snapshot='none'": 20,
    "steps:mlp": 75,
    "steps:cnn": 75,
    "trace:cnn": 25,
    "steps:transformer": 130,
    "trace:transformer": 40,
}
SECTIONS = list(dict.fromkeys(part.partition(":")[0] for part in PARTS))
_LEAST_SECONDS = 5
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


def main(arguments: list[str] | None = None) -> int:
    """Runs the chosen sections; returns the exit status."""
    settings = _parse(arguments)
    end, out = time.monotonic() + settings.seconds, Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        environment = _environment(folder)
        (device, *broken) = _rows_of("device:all", 60, [], environment, folder)
        if "broken" in device or broken:
            raise SystemExit(f"JAX finds no device. {device}")
        is_quick = settings.quick or device["platform"] == "cpu"
        texts, found = [tables.title(device, is_quick)], {}
        print(texts[0], flush=True)
        for part, seconds in PARTS.items():
            if part.partition(":")[0] not in settings.sections:
                continue
            own = dict(environment)
            if part.startswith("correctness"):
                # Read when JAX is imported: the same bits are promised with these alone.
                own["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
                if device["platform"] == "gpu":
                    own["XLA_FLAGS"] = f"{own.get('XLA_FLAGS', '')} {_DETERMINISTIC}".strip()
            left = min(seconds, end - time.monotonic())
            if is_quick:  # One round each, on a machine that may be busy.
                left = 600
            quick = ["--quick"] * is_quick
            found[part] = [*_rows_of(part, left, quick, own, folder)]
            texts.append(tables.section(part, found[part]))
            print(texts[-1], flush=True)
            content = {"environment": device, "quick": is_quick, "parts": found}
            (out / "accelerator.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
            (out / "accelerator.md").write_text("\n".join(texts), "utf-8")
    rows = [row for part in found.values() for row in part]
    failed = [row for row in rows if not row.get("passed", True) or row.get("is_failure")]
    print(f"{len(failed)} failures. All is in {out}.")
    return 1 if failed else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.accelerator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", default="accelerator", metavar="FOLDER")
    parser.add_argument("--sections", nargs="+", default=SECTIONS, choices=SECTIONS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny models: only whether it works")
    return parser.parse_args(arguments)


def _environment(folder: str) -> dict[str, str]:
    """Returns the environment of parts, which share compiled programs, and memory with torch."""
    defaults = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_COMPILATION_CACHE_DIR": f"{folder}/programs",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return {**defaults, **os.environ}


def _rows_of(
    part: str, seconds: float, options: list[str], environment: dict[str, str], folder: str
) -> Iterator[dict[str, Any]]:
    """Yields the rows of a part, and the reason if it broke off."""
    section, _, name = part.partition(":")
    if seconds < _LEAST_SECONDS:
        yield {"broken": "There was no time left.", "is_failure": section == "correctness"}
        return
    rows, errors = Path(folder, "rows"), Path(folder, "errors")
    command = [sys.executable, "-m", "benchmarks.accelerator.part", section, name, *options]
    # Start-up and a last round that takes longer than the others are not in its own time.
    command += ["--seconds", str(0.75 * seconds), "--rows", str(rows)]
    rows.write_text("")
    with errors.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        why, is_failure = "", True
        try:
            if code := process.wait(seconds):
                why = f"it ended with status {code}"
        except subprocess.TimeoutExpired:
            # Rivals may take long to compile; that nothing was found wrong is no proof.
            why, is_failure = f"it took longer than {seconds:.0f} s", section == "correctness"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    for line in rows.read_text("utf-8").splitlines():
        if line.endswith("}"):  # Not one that was cut off.
            yield json.loads(line)
    if why:
        said = errors.read_text("utf-8", "replace").strip()
        broken = ": ".join(["The rest is missing", why, *said.splitlines()[-1:]])
        yield {"broken": broken, "output": said[-4000:], "is_failure": is_failure}


if __name__ == "__main__":
    sys.exit(main())
