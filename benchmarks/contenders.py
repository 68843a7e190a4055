"""Contenders: what is compared, by name, and how each is made."""

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
"""The contender that the ratios are to where no other is as fast."""


class Contender(NamedTuple):
    """A model in training, under somebody's care."""

    count: Callable[[], int]
    """The number of parameters; known after the first epoch."""
    train: Callable[[int], float]
    """Trains that many epochs more, and returns the mean loss over the last of them."""
    evaluate: Callable[[], tuple[float, float]] | None = None
    """The loss and the accuracy on the data that it trains on."""
    predict: Callable[[], np.ndarray] | None = None
    """The logits of all examples, in order, on the host."""


class Recipe(NamedTuple):
    """How to make a contender, and where."""

    maker: str
    """A function `(workload, params) -> Contender` as "module:name"; it alone imports the rival."""
    options: dict[str, Any] = {}
    needs: str = ""
    """The package that must be installed."""
    is_scan: bool = False
    """Whether it takes several steps in one call of the device."""
    is_rival: bool = False
    """Whether ratios are to it, where it is the fastest of those that take as many steps a call."""
    spreads: bool = False
    """Whether it can use several devices."""
    models: tuple[str, ...] = ()
    """The workloads that it has a network for; none named: all."""


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
    """Makes a contender; with its own initial parameters where none are given."""
    recipe = RECIPES[name]
    module, _, function = recipe.maker.partition(":")
    maker = getattr(importlib.import_module(module), function)
    return maker(workload, params, **recipe.options, **options)


def trains(name: str, model: str) -> bool:
    """Whether the contender has a network for a workload."""
    return model in (RECIPES[name].models or (model,))


def installed(name: str) -> bool:
    """Whether what the contender needs is there."""
    needs = RECIPES[name].needs
    return not needs or importlib.util.find_spec(needs) is not None


class _Terminal(io.TextIOWrapper):
    """A terminal that nobody looks at."""

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
