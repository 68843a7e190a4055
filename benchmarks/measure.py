"""Measures contenders in turns, after checking that they do the same work."""

import dataclasses
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import contenders as contenders_
from benchmarks.contenders import RECIPES, Contender
from benchmarks.linen_models import initial_params
from benchmarks.turns import around_median
from benchmarks.workloads import Workload

QUANTITIES = ("step", "evaluate", "predict")
# Keras places the epsilon of Adam elsewhere than the others do. After 32 steps of the CNN that
# makes 0.1 % of the mean loss and 0.6 % of the last; elsewhere all agree to 0.01 %.
_LOSS_TOLERANCE = 5e-3
_LAST_LOSS_TOLERANCE = 2e-2
_LOGIT_TOLERANCE = 5e-2
# Of fewer values not even the least and the greatest have the median between them so surely.
_LEAST_ROUNDS = 6


@dataclasses.dataclass
class Measurement:
    """One quantity of several contenders, measured in the same rounds."""

    model: str
    quantity: str
    unit: str
    values: dict[str, list[float]]
    """By contender, one value per round, in the same order for all."""
    losses: dict[str, float]
    n_devices: int = 1
    load: float = 0.0
    """The load at the end: if it exceeds the number of cores, the values are unreliable."""

    def best(self, name: str) -> str | None:
        """Returns the fastest hand-written loop that takes as many steps a call as a contender.

        If none of these was measured, returns the fastest of all; if none at all, None.
        """
        rivals = [each for each in self.values if RECIPES[each].is_rival]
        alike = [each for each in rivals if RECIPES[each].is_scan == RECIPES[name].is_scan]
        return min(
            alike or rivals, key=lambda each: statistics.median(self.values[each]), default=None
        )

    def ratio(self, name: str, base: str | None) -> float | None:
        """Returns the median over the rounds of the ratio to the base; None if not measured."""
        ratios = self._ratios(name, base)
        return statistics.median(ratios) if ratios else None

    def bounds(self, name: str, base: str | None) -> tuple[float, float] | None:
        """Returns the 95 % confidence bounds of the ratio; None with too few rounds."""
        ratios = self._ratios(name, base)
        return around_median(ratios) if len(ratios) >= _LEAST_ROUNDS else None

    def _ratios(self, name: str, base: str | None) -> list[float]:
        """Returns the ratio to the base in each round; empty if not measured."""
        if base not in self.values or name not in self.values:
            return []
        pairs = zip(self.values[name], self.values[base], strict=True)
        return [a / b for a, b in pairs]


def pooled(measurements: Sequence[Measurement]) -> Measurement:
    """Merges the measurements of several processes, as one with all their rounds.

    Raises:
      SystemExit: a contender came to another loss in another process.
    """
    first = measurements[0]
    for name in first.losses:
        by_process = {f"{name}, process {i}": m.losses[name] for i, m in enumerate(measurements)}
        check_losses(by_process, _LOSS_TOLERANCE)
    values = {
        name: [x for each in measurements for x in each.values[name]] for name in first.values
    }
    return dataclasses.replace(first, values=values, load=max(each.load for each in measurements))


def measure(
    workload: Workload,
    names: Iterable[str],
    *,
    quantities: Iterable[str] = QUANTITIES,
    rounds: int,
    n_devices: int = 1,
) -> list[Measurement]:
    """Microseconds per training step, and per example evaluated or predicted.

    Raises:
      SystemExit: the contenders do not do the same work, so that the times would compare nothing.
    """
    names = [name for name in names if _can_run(name, workload, n_devices)]
    if n_devices > (n := len(jax.devices())):
        print(f"{n_devices} devices are left out: there are {n}.", file=sys.stderr)
        return []
    if not names:
        return []
    options = {"n_devices": n_devices} if n_devices > 1 else {}
    params = initial_params(workload)
    with contenders_.unseen_terminal():
        contenders = {name: contenders_.make(name, workload, params, **options) for name in names}
        losses = {name: contender.train(1) for name, contender in contenders.items()}
        check(contenders, losses)
        return [
            Measurement(
                workload.name if workload.name != "leaves" else f"leaves-{workload.sizes[0]}",
                quantity,
                unit,
                _rounds(blocks, n, rounds),
                losses,
                n_devices,
                os.getloadavg()[0],
            )
            for quantity, unit, blocks, n in _blocks(workload, contenders)
            if quantity in quantities
        ]


def check(contenders: dict[str, Contender], losses: dict[str, float]) -> None:
    """Ends the program unless the contenders agree in parameters, losses and predictions."""
    counts = {name: contender.count() for name, contender in contenders.items()}
    if len(set(counts.values())) > 1:
        raise SystemExit(f"The numbers of parameters disagree: {counts}")
    check_losses(losses, _LOSS_TOLERANCE)
    measured = {name: each.evaluate()[0] for name, each in contenders.items() if each.evaluate}
    check_losses(measured, _LAST_LOSS_TOLERANCE)
    logits = {name: each.predict() for name, each in contenders.items() if each.predict}
    first = next(iter(logits.values()), np.zeros(1))
    for name, each in logits.items():
        far = np.abs(each - first).mean() / np.abs(first).mean()
        if each.shape != first.shape or not far <= _LOGIT_TOLERANCE:
            raise SystemExit(
                f"The predictions of {name} are off those of {next(iter(logits))} by {far:.1e} of "
                "their size, so the times compare nothing."
            )


def check_losses(losses: dict[str, float], tolerance: float) -> None:
    """Ends the program unless the losses agree to that relative tolerance."""
    first = next(iter(losses.values()), 0.0)
    # Written so that a loss that is not a number disagrees.
    if not all(abs(loss - first) <= tolerance * abs(first) for loss in losses.values()):
        raise SystemExit(f"The losses disagree, so the times compare nothing: {losses}")


def _can_run(name: str, workload: Workload, n_devices: int) -> bool:
    recipe = RECIPES[name]
    if (n_devices > 1 and not recipe.spreads) or not contenders_.trains(name, workload.name):
        return False
    if workload.name == "leaves":
        return recipe.maker.endswith(("hand_written:make", "flaxfit:train_loop"))
    # XLA's loops on a CPU run the gradients of convolutions an order of magnitude slower.
    is_loop = recipe.is_rival and recipe.is_scan
    return not (is_loop and workload.name == "cnn" and jax.default_backend() == "cpu")


def _blocks(
    workload: Workload, contenders: dict[str, Contender]
) -> list[tuple[str, str, dict[str, Callable[[], Any]], int]]:
    """Yields quantities: name, unit, a function for each contender, the units per call."""
    epochs, n_examples = workload.epochs, len(workload.x)

    def train(contender: Contender) -> Callable[[], Any]:
        return lambda: contender.train(epochs)

    def repeat(call: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: [call() for _ in range(epochs)]

    # How many steps a call takes matters to training alone.
    users = {name: each for name, each in contenders.items() if not RECIPES[name].options}
    n = epochs * n_examples
    return [
        (
            "step",
            "us per step",
            {name: train(each) for name, each in contenders.items()},
            epochs * workload.n_steps,
        ),
        (
            "evaluate",
            "us per example",
            {name: repeat(each.evaluate) for name, each in users.items() if each.evaluate},
            n,
        ),
        (
            "predict",
            "us per example",
            {name: repeat(each.predict) for name, each in users.items() if each.predict},
            n,
        ),
    ]


def _rounds(blocks: dict[str, Callable[[], Any]], n: int, rounds: int) -> dict[str, list[float]]:
    """Returns microseconds per unit by contender; each round has a new random order."""
    values: dict[str, list[float]] = {name: [] for name in blocks}
    order = random.Random()
    for i in range(rounds + 1):
        for name in order.sample(list(blocks), len(blocks)):
            gc.collect()
            began = time.perf_counter()
            blocks[name]()
            seconds = time.perf_counter() - began
            if i:  # The first round still warms up.
                values[name].append(seconds / n * 1e6)
        if not i:
            # What stays for good need not be looked through again: of all rivals' modules that
            # would take most of the time.
            gc.collect()
            gc.freeze()
    gc.unfreeze()
    return values
