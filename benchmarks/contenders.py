"""Contenders: the compared loops by name, and how to make each."""

import contextlib
import importlib
import importlib.util
import io
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.workloads import Workload

BASE = "hand-written"
"""The contender that ratios refer to unless another is as fast."""


class Contender(NamedTuple):
    """A model in training, driven by one library."""

    count: Callable[[], int]
    """The number of parameters; known after the first epoch."""
    train: Callable[[int], float]
    """Trains for more epochs, and returns the mean loss of the last one."""
    evaluate: Callable[[], tuple[float, float]] | None = None
    """Returns the loss and the accuracy on the training data."""
    predict: Callable[[], np.ndarray] | None = None
    """Returns the logits of all examples, in order, on the host."""


class Recipe(NamedTuple):
    """How to make a contender, and where."""

    maker: str
    """A function `(workload, params) -> Contender` as "module:name"; it alone imports the rival."""
    options: dict[str, Any] = {}
    needs: str = ""
    """The package that must be installed."""
    is_scan: bool = False
    """Whether it takes several steps per dispatch."""
    is_rival: bool = False
    """Whether ratios refer to it if it is the fastest with as many steps per dispatch."""
    spreads: bool = False
    """Whether it can use several devices."""
    models: tuple[str, ...] = ()
    """The workloads that it has a network for; empty: all."""


_HAND = "benchmarks.hand_written:make"
_SEVERAL = {"steps_per_call": 32}

RECIPES = {
    BASE: Recipe(_HAND, is_rival=True, spreads=True),
    "hand-written, host-fed": Recipe(_HAND, {"resident": False}, is_rival=True),
    "hand-written, with a bar": Recipe(_HAND, {"bar": True}, spreads=True),
    "hand-written, 32 a call": Recipe(_HAND, _SEVERAL, is_rival=True, is_scan=True),
    "hand-written, host-fed, 32 a call": Recipe(
        _HAND, {"resident": False, **_SEVERAL}, is_rival=True, is_scan=True
    ),
    "TrainLoop": Recipe("benchmarks.with_flaxfit:train_loop", spreads=True),
    "TrainLoop, with a rest": Recipe(
        "benchmarks.with_flaxfit:train_loop", {"rest": True}, spreads=True
    ),
    "TrainLoop, borrowed": Recipe(
        "benchmarks.with_flaxfit:train_loop", {"snapshot": "none"}, models=("leaves",)
    ),
    "TrainLoop, host-fed": Recipe("benchmarks.with_flaxfit:train_loop", {"resident": False}),
    "TrainLoop, 32 a call": Recipe(
        "benchmarks.with_flaxfit:train_loop", _SEVERAL, is_scan=True, spreads=True
    ),
    "TrainLoop, host-fed, 32 a call": Recipe(
        "benchmarks.with_flaxfit:train_loop", {"resident": False, **_SEVERAL}, is_scan=True
    ),
    "TrainLoop, nnx": Recipe("benchmarks.with_flaxfit:train_loop_of_nnx", models=("mlp",)),
    "Model.fit": Recipe("benchmarks.with_flaxfit:fit", spreads=True),
    "Model.fit, 32 a call": Recipe(
        "benchmarks.with_flaxfit:fit", {"steps_per_execution": 32}, is_scan=True, spreads=True
    ),
    "Model.fit, auto": Recipe(
        "benchmarks.with_flaxfit:fit", {"steps_per_execution": "auto"}, is_scan=True
    ),
    "Keras": Recipe("benchmarks.with_keras:make", needs="keras"),
    "Keras, 32 a call": Recipe(
        "benchmarks.with_keras:make",
        {"steps_per_execution": 32, "jit_compile": True},
        needs="keras",
        is_scan=True,
    ),
    "Kauldron": Recipe("benchmarks.with_kauldron:make", needs="kauldron"),
    "torch": Recipe("benchmarks.with_torch:plain", needs="torch"),
    "Lightning": Recipe("benchmarks.with_torch:lightning", needs="lightning"),
}


def make(name: str, workload: Workload, params: Any = None, **options: Any) -> Contender:
    """Makes a contender, with its own initial parameters if none are given."""
    recipe = RECIPES[name]
    module, _, function = recipe.maker.partition(":")
    maker = getattr(importlib.import_module(module), function)
    return maker(workload, params, **recipe.options, **options)


def trains(name: str, model: str) -> bool:
    """Returns whether the contender has a network for a workload."""
    return model in (RECIPES[name].models or (model,))


def installed(name: str) -> bool:
    """Returns whether the package that the contender needs is installed."""
    needs = RECIPES[name].needs
    return not needs or importlib.util.find_spec(needs) is not None


class _Terminal(io.TextIOWrapper):
    """A terminal whose output is discarded."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def unseen_terminal() -> Iterator[None]:
    """Lets progress bars draw as on a terminal, without showing them."""
    with (
        open(os.devnull, "wb") as nowhere,
        _Terminal(nowhere, encoding="utf-8") as terminal,
        contextlib.redirect_stdout(terminal),
        contextlib.redirect_stderr(terminal),
    ):
        yield
