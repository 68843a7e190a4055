"""collected: a metric of all outputs at once, computed on the host from the rows of a data set."""

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.metrics._adapter import caller_of, cannot_use, is_metric_class
from flaxfit.metrics._metric import Metric
from flaxfit.metrics._rows import MAX_ROWS, collecting
from flaxfit.tree import (
    Array,
    Function,
    PyTree,
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
        metric = _of_class(f)
        name, mode = name or metric.name, mode or metric.mode
        return dataclasses.replace(metric, name=name, mode=mode, max_rows=max_rows)
    if not callable(f):
        raise TypeError(f"collected needs a function (outputs, targets), got {f!r:.60}.")
    check_argument_order("metric", f)
    name = name or getattr(f, "__name__", None)
    takes_weights = "weights" in parameters(f)

    def prepare(*arguments: PyTree, weights: Array | None = None) -> tuple[PyTree, Array | None]:
        _check_call(name, f, arguments, {"weights": weights} if takes_weights else {})
        return arguments, weights

    return collecting(name, prepare, f, takes_weights=takes_weights, mode=mode, max_rows=max_rows)


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


def is_collecting_class(metric: object) -> TypeGuard[type[Any]]:
    """Returns whether this is a clu `CollectingMetric`, or a class without its own `merge`."""
    # A user with such a class has imported clu; nobody else should pay for its import.
    clu = sys.modules.get("clu.metrics")
    if clu is None or not is_metric_class(metric):
        return False
    return issubclass(metric, clu.CollectingMetric) or metric.merge is clu.Metric.merge


def _of_class(metric_class: type[Any]) -> Metric:
    """Makes a collected `Metric` of a metric class. Rows of weight 0 are left out."""
    clu = sys.modules.get("clu.metrics")
    if clu is not None and issubclass(metric_class, clu.CollectingMetric):
        return _of_collecting_metric(metric_class)

    def prepare(*arguments: PyTree, weights: Array | None = None) -> tuple[PyTree, Array | None]:
        caller_of(metric_class, arguments)  # Raises if they do not fit.
        return arguments, weights

    def value(*arguments: PyTree) -> np.ndarray:
        call = caller_of(metric_class, arguments)
        return np.asarray(call(*jax.tree.map(jnp.asarray, arguments)).compute())

    return collecting(metric_class.__name__, prepare, value, takes_weights=False)


def _of_collecting_metric(metric_class: type[Any]) -> Metric:
    """Collects the values that the class keeps of each batch, and computes from all of them."""
    name = metric_class.__name__

    def prepare(*arguments: PyTree, weights: Array | None = None) -> tuple[PyTree, Array | None]:
        named: dict[str, PyTree] = {}
        for role, each in zip(("logits", "labels"), arguments, strict=False):
            named |= each if isinstance(each, Mapping) else {role: each}
        try:
            state = metric_class.from_model_output(**named)
        except KeyError as error:
            why = f"it asks for the model output {error}, and flaxfit passes {', '.join(named)}"
            raise cannot_use(name, why) from error
        return (state.values,), weights

    def value(values: PyTree) -> Any:
        return metric_class(values).compute()

    return collecting(name, prepare, value, takes_weights=False)
