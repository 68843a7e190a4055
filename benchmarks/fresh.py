"""Fresh processes: time and memory from the start of Python to a trained model.

    python -m benchmarks.fresh CONTENDER MODEL EPOCHS N_STEPS [--quick]

trains in the present process, and prints the loss, the time of day when it was done, and the peak
memory; `measure` starts such processes.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

from benchmarks import contenders, workloads

# Every contender draws its own initial parameters here, spread as linen's where that tells.
LOSS_TOLERANCE = 0.3


def measure(model: str, names: Iterable[str], *, rounds: int, quick: bool) -> dict[str, Any]:
    """Runs each contender in fresh processes, in turn.

    Returns:
      The quantities "first step" and "end to end" (seconds from the start of the process, loading
      the data included) and "memory" (MiB), each by contender and round; and the losses at the end.
    """
    names = list(names)
    found: dict[str, Any] = {
        quantity: {name: [] for name in names}
        for quantity in ("first step", "end to end", "memory")
    }
    found["losses"] = {}
    epochs = 1 if quick else workloads.make(model, quick).epochs_from_start
    for i in range(rounds + (not quick)):
        for name in names:
            first, last = _run(name, model, 1, 1, quick), _run(name, model, epochs, 10**9, quick)
            found["losses"][name] = last["loss"]
            if i or quick:  # The first round only fills the file caches.
                found["first step"][name].append(first["seconds"])
                found["end to end"][name].append(last["seconds"])
                found["memory"][name].append(last["mebibytes"])
    return found


def peak_mebibytes() -> float:
    """Returns the peak memory of this process.

    Not `ru_maxrss` where it can be helped: on Linux that begins with the peak of the parent.
    """
    try:
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def _run(name: str, model: str, epochs: int, n_steps: int, quick: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.fresh", name, model, str(epochs), str(n_steps)]
    began = time.time()
    done = subprocess.run(
        [*command, *["--quick"] * quick], stdout=subprocess.PIPE, text=True, check=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    return result | {"seconds": result["time"] - began}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("contender")
    parser.add_argument("model")
    parser.add_argument("epochs", type=int)
    parser.add_argument("n_steps", type=int)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    workload = workloads.make(arguments.model, arguments.quick).cut(arguments.n_steps)
    with contenders.unseen_terminal():
        contender = contenders.make(arguments.contender, workload)
        loss = contender.train(arguments.epochs)
        done = time.time()
    print(json.dumps({"loss": loss, "time": done, "mebibytes": peak_mebibytes()}), flush=True)
    # What libraries do at their exit is not measured, nor waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
