"""Callbacks: what happens at a checkpoint, `Checkpoint -> Checkpoint | None`."""

import sys as _sys

from flaxfit.callbacks._average_weights import AverageWeights
from flaxfit.callbacks._callback import Callback, StatefulCallback
from flaxfit.callbacks._events import Events
from flaxfit.callbacks._exit import ExitCode
from flaxfit.callbacks._export import Export
from flaxfit.callbacks._log_to import Logger, LogTo
from flaxfit.callbacks._loggers import CSVLogger, JSONLogger
from flaxfit.callbacks._memory import MemoryReport
from flaxfit.callbacks._mlflow import MLflowLogger
from flaxfit.callbacks._norms import Norms
from flaxfit.callbacks._plateau import ReduceLROnPlateau
from flaxfit.callbacks._profiler import Profiler
from flaxfit.callbacks._progress import ProgressBar
from flaxfit.callbacks._rate_scheduler import LearningRateScheduler
from flaxfit.callbacks._rollback import Rollback
from flaxfit.callbacks._schedules import at, every, when
from flaxfit.callbacks._signal import SaveOnSignal
from flaxfit.callbacks._stopping import EarlyStopping, StopOnNaN
from flaxfit.callbacks._summary import SummaryLogger
from flaxfit.callbacks._swap_ema import SwapEMA
from flaxfit.callbacks._tensorboard import TensorBoardLogger
from flaxfit.callbacks._throughput import Throughput
from flaxfit.callbacks._timer import Timer
from flaxfit.callbacks._unfreeze import Unfreeze
from flaxfit.callbacks._wandb import WandbLogger
from flaxfit.callbacks._watchdog import Watchdog
from flaxfit.tree import COUNTERPARTS as _COUNTERPARTS

__all__ = [
    "AverageWeights",
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "Events",
    "ExitCode",
    "Export",
    "JSONLogger",
    "LearningRateScheduler",
    "LogTo",
    "Logger",
    "MLflowLogger",
    "MemoryReport",
    "Norms",
    "Profiler",
    "ProgressBar",
    "ReduceLROnPlateau",
    "Rollback",
    "SaveOnSignal",
    "StatefulCallback",
    "StopOnNaN",
    "SummaryLogger",
    "SwapEMA",
    "TensorBoardLogger",
    "Throughput",
    "Timer",
    "Unfreeze",
    "WandbLogger",
    "Watchdog",
    "at",
    "every",
    "when",
]


def __getattr__(name: str) -> object:
    advice = f": use flaxfit's {_COUNTERPARTS[name]}" if name in _COUNTERPARTS else ""
    words = f"module {__name__!r} has no attribute {name!r}{advice}"
    raise AttributeError(words, name=name, obj=_sys.modules[__name__])
