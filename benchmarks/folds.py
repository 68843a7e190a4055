"""Folds of a cross-validation: the cost of the first, and the compilation in later ones.

    python -m benchmarks.folds [--folds 5] [--quick]

Each form of the digits MLP is trained in a process of its own, with an empty compilation cache: one
epoch by fold, with a new model and other rows. The seconds of compiling are those of JAX's
monitoring events, which include reading programs from the cache.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from sklearn.datasets import load_digits

import flaxfit as ff

COMPILED = "/jax/core/compile/backend_compile_duration"
MOST = 0.3
"""The seconds of compilation allowed in a fold after the first."""


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.relu(nn.Dense(256)(x))
        return nn.Dense(10)(nn.Dropout(0.2, deterministic=not train)(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 256, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.hidden(x))))


MODULES: dict[str, Any] = {
    "nnx instance": lambda fold: Net(nnx.Rngs(fold)),
    "nnx class": lambda fold: Net,
    "linen": lambda fold: Linen(),
}


def run(form: str, n_folds: int, n_rows: int | None) -> None:
    """Prints the seconds of the first and a later fold, in all and in compilation."""
    compiled = [0.0]
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: compiled.append(duration_secs * (event == COMPILED))
    )
    images, labels = (each[:n_rows] for each in load_digits(return_X_y=True))
    x, y = (images / 16).astype(np.float32), labels.astype(np.int32)
    folds = []
    for i in range(n_folds):
        is_held_out = np.arange(len(x)) % n_folds == i
        data = x[~is_held_out], y[~is_held_out]
        held_out = x[is_held_out], y[is_held_out]
        began, before = time.perf_counter(), sum(compiled)
        model = ff.Model(MODULES[form](i), optax.adam(3e-3), "crossentropy", ["accuracy"], seed=i)
        model.fit(*data, batch_size=32, validation_data=held_out, verbose=0)
        folds.append((time.perf_counter() - began, sum(compiled) - before))
    (first, of_first), *others = folds
    seconds, most = statistics.median(s for s, _ in others), max(c for _, c in others)
    print(
        f"{form:12}  first fold {first:5.2f} s, of these compiling {of_first:4.2f} s   a further "
        f"fold {seconds:5.2f} s, of these compiling at most {most:4.2f} s (bound {MOST})",
        flush=True,
    )


def main() -> None:
    """Runs each form in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2 folds of 320 rows")
    parser.add_argument("--form", choices=MODULES, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.form:
        run(settings.form, 2 if settings.quick else settings.folds, 320 if settings.quick else None)
        return
    for form in MODULES:
        command = [sys.executable, "-m", "benchmarks.folds", *sys.argv[1:], "--form", form]
        with tempfile.TemporaryDirectory() as caches:
            own = {key: each for key, each in os.environ.items() if "COMPILATION_CACHE" not in key}
            own |= {"XDG_CACHE_HOME": caches, "FLAXFIT_COMPILATION_CACHE": "auto"}
            subprocess.run(command, env=own, check=True)


if __name__ == "__main__":
    main()
