"""collected: a metric of all outputs at once, computed on the host from the rows of a data set."""

import dataclasses
import inspect
from typing import Any

from flaxfit.metrics._adapter import is_metric_class
from flaxfit.metrics._collecting_classes import from_collecting_class
from flaxfit.metrics._metric import Metric
from flaxfit.metrics._rows import MAX_ROWS, rows_of, value_of
from flaxfit.tree import (
    Array,
    Function,
    PyTree,
    Sums,
    check_argument_order,
    parameters,
    whole_number,
)


def collected(
    f: Function, *, max_rows: int = MAX_ROWS, name: str | None = None, mode: str | None = None
) -> Metric:
    """Makes a metric of a function of all outputs and targets at once, on the host.

    For metrics that are not sums over examples: rank correlations, average precision, BLEU, or your
    own `compute_metrics`. The outputs and targets of every example are kept in NumPy arrays, in the
    order of the data, and the function is called once, at the end. Examples of weight 0 are left
    out. It is measured in evaluation only: by `EvalLoop`, `Model.evaluate` and on validation data.

    To keep less than all outputs and targets of an example, reduce them on the device with `on`.

    >>> import numpy as np
    >>> def largest_error(outputs, targets):
    ...     return np.abs(outputs - targets).max()
    >>> metric = collected(largest_error)
    >>> metric.compute(metric.measure(np.array([1.0, 5.0]), np.array([0.0, 1.0])))
    4.0

    Args:
      f: `(*outputs, *targets) -> value`, of NumPy arrays with a row for each example. It returns a
        number, an array, or a mapping of these. A mapping gives several metrics, named by its keys;
        for a metric in a mapping, `{"ner": collected(f)}`, by its name and the key: "ner_f1". If it
        has a parameter `weights`, it receives the weights of the examples; otherwise all examples
        count equally. Or a metric class of clu or metrax, which receives all rows at once.
      max_rows: the maximum number of rows; more are an error.
      name: the name of the metric in a list; by default the function's name.
      mode: "min" or "max" if lower or higher values of the number are better.

    Raises:
      TypeError: `f` is not a function, or takes the targets first.
    """
    whole_number("max_rows", max_rows)
    if is_metric_class(f):
        metric = from_collecting_class(f)
        name, mode = name or metric.name, mode or metric.mode
        return dataclasses.replace(metric, name=name, mode=mode, max_rows=max_rows)
    if not callable(f):
        raise TypeError(f"collected needs a function (outputs, targets), got {f!r:.60}.")
    check_argument_order("metric", f)
    name = name or getattr(f, "__name__", None)
    takes_weights = "weights" in parameters(f)

    def measure(*arguments: PyTree, weights: Array | None = None) -> Sums:
        _check_call(name, f, arguments, {"weights": weights} if takes_weights else {})
        return rows_of(name, arguments, weights)

    def compute(rows: Sums) -> Any:
        return value_of(name, f, rows, takes_weights=takes_weights)

    return Metric(measure, compute, name, mode=mode, max_rows=max_rows)


def _check_call(name: str | None, f: Function, arguments: PyTree, options: Any) -> None:
    try:
        inspect.signature(f).bind(*arguments, **options)
    except TypeError as mismatch:
        raise TypeError(
            f"The metric {name!r} takes other arguments than it is given: {mismatch}. It is called "
            f"with the outputs and the targets by position, {len(arguments)} of them. A "
            "compute_metrics that takes a pair is collected(lambda outputs, targets: "
            "compute_metrics((outputs, targets)))."
        ) from None
    except ValueError:  # Some callables have no signature.
        return
