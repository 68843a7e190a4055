"""Trains Flax models: `Model` fits, evaluates and predicts; `TrainLoop` is for your own loops.

The sub-packages `callbacks`, `checkpoints`, `data`, `export`, `importers`, `launch`, `losses`,
`metrics`, `modules`, `optim`, `sklearn` and `strategies` are imported when they are first used.
"""

import importlib
import importlib.util
import sys
from typing import Any

from flaxfit.callbacks._history import History as History
from flaxfit.data import ArrayStream as ArrayStream
from flaxfit.data._batch import Batch as Batch
from flaxfit.distributed._initialize import initialize as initialize
from flaxfit.distributed._processes import is_main as is_main
from flaxfit.distributed._processes import process_count as process_count
from flaxfit.distributed._processes import process_index as process_index
from flaxfit.loop._eval_loop import EvalLoop as EvalLoop
from flaxfit.loop._train_loop import EndOfData as EndOfData
from flaxfit.loop._train_loop import TrainLoop as TrainLoop
from flaxfit.loop._update_statistics import update_statistics as update_statistics
from flaxfit.model._model import Model as Model
from flaxfit.state._checkpoint import Checkpoint as Checkpoint
from flaxfit.state._train_state import InferenceState as InferenceState
from flaxfit.state._train_state import TrainState as TrainState
from flaxfit.step._eval_step import make_eval_step as make_eval_step
from flaxfit.step._eval_step import make_predict_step as make_predict_step
from flaxfit.step._init_state import init_state as init_state
from flaxfit.step._multi_task import MultiTask as MultiTask
from flaxfit.step._random import step_key as step_key
from flaxfit.step._train_step import make_train_step as make_train_step
from flaxfit.strategies import DataParallel as DataParallel
from flaxfit.strategies import Sharded as Sharded
from flaxfit.strategies import gather as gather
from flaxfit.task._task import EvalTask as EvalTask
from flaxfit.task._task import TrainTask as TrainTask

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
