"""Metrics: pairs of pure functions, `measure` on the device and `compute` on the host.

Sums, not means: what `measure` returns adds up over batches, devices and hosts, and `compute`
divides once, at the end. So the value is that of all the data at once, whatever the batches.

>>> import numpy as np
>>> logits, labels = np.array([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]]), np.array([0, 1, 1])
>>> accuracy.compute(accuracy.measure(logits, labels, weights=np.array([1.0, 2.0, 1.0])))
0.75
"""

from flaxfit.metrics._accuracy import accuracy, binary_accuracy, top_k
from flaxfit.metrics._auc import auc
from flaxfit.metrics._confusion import (
    confusion_matrix,
    f1,
    plot_confusion_matrix,
    precision,
    recall,
)
from flaxfit.metrics._metric import Metric, mean
from flaxfit.metrics._names import as_metrics, on
from flaxfit.metrics._regression import mae, mse, perplexity, r2, rmse

__all__ = [
    "Metric",
    "accuracy",
    "as_metrics",
    "auc",
    "binary_accuracy",
    "confusion_matrix",
    "f1",
    "mae",
    "mean",
    "mse",
    "on",
    "perplexity",
    "plot_confusion_matrix",
    "precision",
    "r2",
    "recall",
    "rmse",
    "top_k",
]
