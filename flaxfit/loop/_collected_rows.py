"""CollectedRows: the outputs and targets of an evaluation, for metrics over all rows at once."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from flaxfit.data._batch import Batch, n_examples
from flaxfit.data._sample_weights import OTHER_OUTPUTS, of_output
from flaxfit.display import count, size
from flaxfit.metrics import Metric
from flaxfit.metrics._rows import check_values, values_by_name
from flaxfit.tree import ArrayLike, PyTree, Sums


class CollectedRows:
    """Keeps the rows of collected metrics on the host, except rows of weight 0.

    >>> from flaxfit.metrics import collected
    >>> rows = CollectedRows({"most": collected(lambda outputs: outputs.max(), name="most")})
    >>> rows.add({"most": {"arguments": (np.array([1, 2, 9]),), "weights": np.array([1, 1, 0])}})
    >>> rows.values({})
    {'most': 2.0}

    Args:
      metrics: all metrics of a task, by name.
    """

    def __init__(self, metrics: Mapping[str, Metric]):
        self._metrics = of_rows(metrics)
        self._kept: dict[str, _Rows] = {name: _Rows() for name in self._metrics}

    def add(self, rows: Mapping[str, Sums]) -> None:
        """Adds the rows of a batch, in which padding has weight 0.

        Raises:
          ValueError: a metric exceeds `max_rows`, or its rows changed their shape.
        """
        for name, each in rows.items():
            kept = self._kept[name]
            kept.add(name, each, _counts(each["weights"]))
            _check_bound(name, self._metrics[name], kept.n, kept.n_bytes)

    def values(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """Computes the metrics by name; a name in `others` is an error."""
        values = dict(others)
        for name, metric in self._metrics.items():
            found = values_by_name(name, metric, metric.compute(self._kept[name].rows()))
            check_values(found, values, name)
            values |= found
        return {name: value for name, value in values.items() if name not in others}


class _Rows:
    """Growing arrays, doubled in size when they are full."""

    def __init__(self) -> None:
        self.n = 0
        self._structure: Any = None
        self._arrays: list[np.ndarray] = []

    @property
    def n_bytes(self) -> int:
        """The size of the rows."""
        return sum(array[: self.n].nbytes for array in self._arrays)

    def add(self, name: str, rows: PyTree, chosen: np.ndarray) -> None:
        """Appends the chosen rows."""
        leaves, self._structure = jax.tree.flatten(rows)
        if not self._arrays:
            self._arrays = [np.empty((0, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        self._arrays = [
            _extended(name, array, self.n, leaf[chosen])
            for array, leaf in zip(self._arrays, leaves, strict=True)
        ]
        self.n += int(chosen.sum())

    def rows(self) -> PyTree:
        """All rows."""
        return self._structure.unflatten([array[: self.n] for array in self._arrays])


def of_rows(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Returns the collected metrics: those with `max_rows`."""
    return {name: metric for name, metric in metrics.items() if metric.max_rows is not None}


def check_bounds(metrics: Mapping[str, Metric], data: Batch) -> None:
    """Checks the bounds of collected metrics against all data, before anything is measured."""
    for name, metric in of_rows(metrics).items():
        weights = of_output(data.weights, getattr(metric, "output", OTHER_OUTPUTS))
        n = n_examples(data) if weights is None else int(_counts(weights).sum())
        _check_bound(name, metric, n)


def _counts(weights: ArrayLike) -> np.ndarray:
    """Returns a mask of the rows with any nonzero weight."""
    is_counted = np.asarray(weights) != 0
    return is_counted.reshape(len(is_counted), -1).any(1)


def _check_bound(name: str, metric: Metric, n: int, n_bytes: int = 0) -> None:
    if metric.max_rows is not None and n > metric.max_rows:
        taken = f", {size(n_bytes)}," if n_bytes else ""
        raise ValueError(
            f"The metric {name!r} collects the outputs and targets of all examples on the host: "
            f"{count(n)} rows{taken} and more are over its bound of {count(metric.max_rows)}. If "
            f"memory allows, raise it: metrics.collected(f, max_rows=...). To keep a part of each "
            "example, select it with metrics.on(arguments, metric); to measure fewer examples, "
            "pass less data or EvalLoop(n_steps=...)."
        )


def _extended(name: str, array: np.ndarray, n: int, rows: np.ndarray) -> np.ndarray:
    """Writes rows after the first `n` of an array; returns it, or a larger copy if it was full."""
    if rows.shape[1:] != array.shape[1:]:
        raise ValueError(
            f"The metric {name!r} cannot join rows of the shape {rows.shape[1:]} with those of "
            f"earlier batches, of {array.shape[1:]}: pad sequences to one length, or select arrays "
            "of one shape in all batches with metrics.on(arguments, metric)."
        )
    if n + len(rows) > len(array):
        grown = np.empty((max(n + len(rows), 2 * len(array)), *array.shape[1:]), array.dtype)
        grown[:n] = array[:n]
        array = grown
    array[n : n + len(rows)] = rows
    return array
