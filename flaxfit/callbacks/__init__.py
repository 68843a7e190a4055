"""Callbacks: what happens at a checkpoint, `Checkpoint -> Checkpoint | None`."""

import sys as _sys

from flaxfit.callbacks._average_weights import AverageWeights as AverageWeights
from flaxfit.callbacks._callback import Callback as Callback
from flaxfit.callbacks._callback import StatefulCallback as StatefulCallback
from flaxfit.callbacks._events import Events as Events
from flaxfit.callbacks._exit import ExitCode as ExitCode
from flaxfit.callbacks._export import Export as Export
from flaxfit.callbacks._log_to import Logger as Logger
from flaxfit.callbacks._log_to import LogTo as LogTo
from flaxfit.callbacks._loggers import CSVLogger as CSVLogger
from flaxfit.callbacks._loggers import JSONLogger as JSONLogger
from flaxfit.callbacks._memory import MemoryReport as MemoryReport
from flaxfit.callbacks._mlflow import MLflowLogger as MLflowLogger
from flaxfit.callbacks._norms import Norms as Norms
from flaxfit.callbacks._plateau import ReduceLROnPlateau as ReduceLROnPlateau
from flaxfit.callbacks._profiler import Profiler as Profiler
from flaxfit.callbacks._progress import ProgressBar as ProgressBar
from flaxfit.callbacks._rate_scheduler import LearningRateScheduler as LearningRateScheduler
from flaxfit.callbacks._rollback import Rollback as Rollback
from flaxfit.callbacks._schedules import at as at
from flaxfit.callbacks._schedules import every as every
from flaxfit.callbacks._schedules import when as when
from flaxfit.callbacks._signal import SaveOnSignal as SaveOnSignal
from flaxfit.callbacks._stopping import EarlyStopping as EarlyStopping
from flaxfit.callbacks._stopping import StopOnNaN as StopOnNaN
from flaxfit.callbacks._summary import SummaryLogger as SummaryLogger
from flaxfit.callbacks._swap_ema import SwapEMA as SwapEMA
from flaxfit.callbacks._tensorboard import TensorBoardLogger as TensorBoardLogger
from flaxfit.callbacks._throughput import Throughput as Throughput
from flaxfit.callbacks._timer import Timer as Timer
from flaxfit.callbacks._unfreeze import Unfreeze as Unfreeze
from flaxfit.callbacks._wandb import WandbLogger as WandbLogger
from flaxfit.callbacks._watchdog import Watchdog as Watchdog
from flaxfit.tree._other_callbacks import COUNTERPARTS as _COUNTERPARTS

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
