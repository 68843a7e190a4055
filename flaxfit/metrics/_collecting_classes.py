"""Metric classes of clu and metrax of all rows at once, on the host, as where states do not add."""

import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.metrics._adapter import caller_of, cannot_use, is_metric_class
from flaxfit.metrics._metric import Metric
from flaxfit.metrics._rows import MAX_ROWS, rows_of, value_of
from flaxfit.tree import Array, PyTree, Sums


def is_collecting_class(metric: object) -> TypeGuard[type[Any]]:
    """Returns whether this is a clu `CollectingMetric`, or a class without its own `merge`."""
    # A user with such a class has imported clu; nobody else should pay for its import.
    clu = sys.modules.get("clu.metrics")
    if clu is None or not is_metric_class(metric):
        return False
    return issubclass(metric, clu.CollectingMetric) or metric.merge is clu.Metric.merge


def from_collecting_class(metric_class: type[Any]) -> Metric:
    """Makes a collected `Metric` of a metric class. Rows of weight 0 are left out."""
    clu = sys.modules.get("clu.metrics")
    if clu is not None and issubclass(metric_class, clu.CollectingMetric):
        return _from_collecting_metric(metric_class)
    name = metric_class.__name__

    def measure(*arguments: PyTree, weights: Array | None = None) -> Sums:
        caller_of(metric_class, arguments)  # Raises if they do not fit.
        return rows_of(name, arguments, weights)

    def value(*arguments: PyTree) -> np.ndarray:
        call = caller_of(metric_class, arguments)
        return np.asarray(call(*jax.tree.map(jnp.asarray, arguments)).compute())

    return Metric(measure, lambda rows: value_of(name, value, rows), name, max_rows=MAX_ROWS)


def _from_collecting_metric(metric_class: type[Any]) -> Metric:
    """Collects the values that the class keeps of each batch, and computes from all of them."""
    name = metric_class.__name__

    def measure(*arguments: PyTree, weights: Array | None = None) -> Sums:
        named = _by_name(arguments)
        try:
            state = metric_class.from_model_output(**named)
        except KeyError as error:
            why = f"it asks for the model output {error}, and flaxfit passes {', '.join(named)}"
            raise cannot_use(name, why) from error
        return rows_of(name, (state.values,), weights)

    def value(values: PyTree) -> Any:
        return metric_class(values).compute()

    return Metric(measure, lambda rows: value_of(name, value, rows), name, max_rows=MAX_ROWS)


def _by_name(arguments: PyTree) -> dict[str, PyTree]:
    """Names outputs and targets: mappings by their keys, others `logits` and `labels`."""
    named: dict[str, PyTree] = {}
    for role, each in zip(("logits", "labels"), arguments, strict=False):
        named |= each if isinstance(each, Mapping) else {role: each}
    return named
