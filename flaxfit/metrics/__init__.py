"""Metrics: pairs of pure functions, `measure` on the device and `compute` on the host."""

from flaxfit.metrics._accuracy import accuracy, binary_accuracy, top_k
from flaxfit.metrics._metric import Metric, mean
from flaxfit.metrics._names import as_metrics

__all__ = ["Metric", "accuracy", "as_metrics", "binary_accuracy", "mean", "top_k"]
