"""A check that classification metrics do not measure regression targets."""

import jax
import numpy as np
import optax

from flaxfit import losses
from flaxfit.data._batch import Batch
from flaxfit.task._task import EvalTask, TrainTask

_REGRESSIONS = (losses.mse, losses.mae, losses.huber, losses.log_cosh)
_REGRESSIONS += (optax.l2_loss, optax.squared_error, optax.huber_loss, optax.log_cosh)
_CLASSIFICATIONS = ("accuracy", "binary_accuracy", "precision", "recall", "f1", "auc")


def check_classes(task: TrainTask | EvalTask, batch: Batch) -> None:
    """Checks that no metric takes the targets of a regression for the labels of two classes.

    Shares between 0 and 1 may be soft labels, but not where the loss is one of regression.
    """
    found = [n for n, m in task.metrics.items() if m.configure and m.name in _CLASSIFICATIONS]
    targets = jax.tree.leaves(batch.targets)
    if not found or len(targets) != 1 or not any(task.loss is each for each in _REGRESSIONS):
        return
    # NaN, which an example of weight 0 may have, is no more than 0.
    values = np.atleast_1d(np.asarray(targets[0], np.float32))
    values = values.reshape(len(values), -1)
    if values.shape[1] > 1 or not (wrong := values % 1 > 0).any():
        return
    raise ValueError(
        f"The metric {found[0]!r} compares classes, but the targets are numbers such as "
        f"{values[wrong][0]:g}: for a regression use 'mae', 'rmse' or 'r2'."
    )
