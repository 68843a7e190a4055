"""Metrics of `flax.nnx`, which are updated in place, as a `Metric` where there is an exact one."""

import sys
from typing import Any

import jax
import jax.numpy as jnp

from flaxfit.metrics._accuracy import accuracy
from flaxfit.metrics._metric import Metric, mean
from flaxfit.tree import Array


def is_nnx_metric(metric: object) -> bool:
    """Returns whether this is a metric of NNX, or its class."""
    # A user of NNX has imported it; nobody else should pay for its import.
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    return issubclass(metric if isinstance(metric, type) else type(metric), nnx.metrics.Metric)


def is_multi_metric(metrics: object) -> bool:
    """Returns whether this is an `nnx.MultiMetric`."""
    return is_nnx_metric(metrics) and hasattr(metrics, "_metric_names")


def members_of_multi(metrics: Any) -> dict[str, Any]:
    """Returns the metrics of an `nnx.MultiMetric` by name, without the mean of the loss."""
    from flax.nnx import metrics as nnx_metrics

    members = {name: getattr(metrics, name) for name in metrics._metric_names}
    loss = members.get("loss")
    if type(loss) is nnx_metrics.Average and loss.argname in ("loss", "values"):
        del members["loss"]  # The loop reports it by that name.
    return members


def from_nnx_metric(metric: Any) -> Metric:
    """Makes a `Metric` of an `nnx.metrics.Accuracy`, which is not updated, and rejects others."""
    from flax.nnx import metrics as nnx_metrics

    kind = metric if isinstance(metric, type) else type(metric)
    if kind is nnx_metrics.Accuracy:
        threshold = getattr(metric, "threshold", None)
        return accuracy if threshold is None else _thresholded(threshold)
    if kind is nnx_metrics.Average:
        what = (
            "nnx.metrics.Average averages what a loop passes to it by name. Pass the function that "
            "computes it, (outputs, targets) -> one value per example, which is averaged with the "
            "weights; the mean of the loss is reported as 'loss' in any case"
        )
    elif kind is nnx_metrics.Welford:
        what = (
            "nnx.metrics.Welford keeps a running mean and variance, which are not sums. Pass the "
            "function that computes the values, for their mean, or "
            "flaxfit.metrics.Metric(measure, compute) with the sums of values and squares"
        )
    elif kind is nnx_metrics.MultiMetric:
        what = "nnx.MultiMetric is several metrics. Pass it alone, as metrics=nnx.MultiMetric(...)"
    else:
        what = (
            f"{kind.__name__} is updated in place by its own code. Use a function that returns "
            "one value per example, or flaxfit.metrics.Metric(measure, compute), where measure "
            "returns what update adds"
        )
    raise TypeError(f"Cannot use this metric of NNX: {what}.")


def _thresholded(threshold: float) -> Metric:
    def is_right(logits: Array, labels: Array) -> jax.Array:
        if jnp.shape(logits) != jnp.shape(labels):
            raise ValueError(
                f"nnx.metrics.Accuracy(threshold={threshold}) compares logits with labels of the "
                f"same shape, got {jnp.shape(logits)} and {jnp.shape(labels)}."
            )
        return (jnp.asarray(logits) >= threshold) == (jnp.asarray(labels) > 0)

    return mean(is_right, name="accuracy")
