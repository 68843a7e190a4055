"""flaxfit trains Flax models; this page is its public API.

The sub-packages `callbacks`, `checkpoints`, `data`, `export`, `losses`, `metrics`, `modules`,
`optim`, `sklearn` and `strategies` are attributes, imported when first used.
"""

import importlib
from typing import Any

from flaxfit._batch import Batch as Batch
from flaxfit._checkpoint import Checkpoint as Checkpoint
from flaxfit._evaluate import EvalLoop as EvalLoop
from flaxfit._history import History as History
from flaxfit._initialize import initialize as initialize
from flaxfit._loop import EndOfData as EndOfData
from flaxfit._loop import TrainLoop as TrainLoop
from flaxfit._model import Model as Model
from flaxfit._multi_task import MultiTask as MultiTask
from flaxfit._processes import is_main as is_main
from flaxfit._processes import process_count as process_count
from flaxfit._processes import process_index as process_index
from flaxfit._state import InferenceState as InferenceState
from flaxfit._state import TrainState as TrainState
from flaxfit._state import init_state as init_state
from flaxfit._step import make_eval_step as make_eval_step
from flaxfit._step import make_predict_step as make_predict_step
from flaxfit._step import make_train_step as make_train_step
from flaxfit._step import step_key as step_key
from flaxfit._task import EvalTask as EvalTask
from flaxfit._task import TrainTask as TrainTask
from flaxfit.data import ArrayStream as ArrayStream
from flaxfit.strategies import DataParallel as DataParallel
from flaxfit.strategies import Sharded as Sharded
from flaxfit.strategies import gather as gather

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


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"flaxfit.{name}")
    raise AttributeError(f"module 'flaxfit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBPACKAGES})
