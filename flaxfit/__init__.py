"""Trains Flax models: `Model` fits, evaluates and predicts; `TrainLoop` is for your own loops.

The sub-packages `callbacks`, `checkpoints`, `data`, `export`, `importers`, `launch`, `losses`,
`metrics`, `modules`, `optim`, `sklearn` and `strategies` are imported when they are first used.
"""

import importlib
import importlib.util
import sys
from typing import Any

from flaxfit.callbacks._history import History
from flaxfit.data import ArrayStream
from flaxfit.data._batch import Batch
from flaxfit.distributed import initialize, is_main, process_count, process_index
from flaxfit.loop import EndOfData, EvalLoop, TrainLoop, update_statistics
from flaxfit.model import Model
from flaxfit.state import Checkpoint, InferenceState, TrainState
from flaxfit.step import (
    MultiTask,
    init_state,
    make_eval_step,
    make_predict_step,
    make_train_step,
    step_key,
)
from flaxfit.strategies import DataParallel, Sharded, gather
from flaxfit.task import EvalTask, TrainTask

__all__ = [
    "ArrayStream",
    "Batch",
    "Checkpoint",
    "DataParallel",
    "EndOfData",
    "EvalLoop",
    "EvalTask",
    "History",
    "InferenceState",
    "Model",
    "MultiTask",
    "Sharded",
    "TrainLoop",
    "TrainState",
    "TrainTask",
    "gather",
    "init_state",
    "initialize",
    "is_main",
    "make_eval_step",
    "make_predict_step",
    "make_train_step",
    "process_count",
    "process_index",
    "step_key",
    "update_statistics",
]

__version__ = "0.1.0"

_SUBPACKAGES = frozenset(
    (
        "callbacks",
        "checkpoints",
        "data",
        "export",
        "importers",
        "launch",
        "losses",
        "metrics",
        "modules",
        "optim",
        "sklearn",
        "strategies",
    )
)

_COUNTERPARTS = {
    "Trainer": "Model, or TrainLoop in a loop of your own",
    "load_model": "Model(...), as it was made, and its load(folder)",
    "seed_everything": "Model(..., seed=...), or rnkey of TrainLoop",
}


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"flaxfit.{name}")
    advice = f": use {_COUNTERPARTS[name]}" if name in _COUNTERPARTS else ""
    words = f"module {__name__!r} has no attribute {name!r}{advice}"
    raise AttributeError(words, name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    is_installed = importlib.util.find_spec("sklearn") is not None
    return sorted(
        {"__version__", *__all__, *_SUBPACKAGES} - (set() if is_installed else {"sklearn"})
    )
