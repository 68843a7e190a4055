"""Makes named `Metric`s of what users pass: names, functions, classes of other libraries."""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flaxfit.display import short_errors
from flaxfit.losses._names import is_loss, resolve
from flaxfit.metrics import (
    _accuracy,
    _agreement,
    _auc,
    _correlations,
    _images,
    _of_rows,
    _probabilities,
    _ranking,
    _rates,
    _regression,
    _text,
)
from flaxfit.metrics._accuracy import top_k
from flaxfit.metrics._adapter import (
    from_metric_class,
    is_collection_class,
    is_metric_class,
    members_of,
)
from flaxfit.metrics._aliases import ALIASES, known_as
from flaxfit.metrics._collected import collected, is_collecting_class
from flaxfit.metrics._confusion import confusion_matrix
from flaxfit.metrics._keras import refuse_keras
from flaxfit.metrics._metric import Metric, mean, why_taken
from flaxfit.metrics._nnx_metrics import (
    from_nnx_metric,
    is_multi_metric,
    is_nnx_metric,
    members_of_multi,
)
from flaxfit.tree import Array, Function, PyTree, Sums, check_order

_MODULES = (_accuracy, _agreement, _rates, _probabilities, _regression, _correlations)
_MODULES += (_auc, _of_rows, _ranking, _text, _images)
_BUILT_IN = {
    str(metric.name): metric
    for module in _MODULES
    for metric in vars(module).values()
    if isinstance(metric, Metric)
}
_AVERAGE = re.compile(r"(.+)_(binary|macro|micro|weighted|samples)")
_RANKINGS = {"precision": "precision_at_k", "recall": "recall_at_k"}
_AT_K = re.compile(r"(ndcg|mrr|precision|recall)(?:_at_|@|_)(\d+)")
_AUC = re.compile(r"(?:roc_)?auc_(ovr|ovo)(_weighted)?")
_NEGATED = re.compile(r"neg_(.*(?:error|loss|deviance|brier_score))")
_TOP = re.compile(r"top_?(\d+)(_accuracy)?")
MetricLike = Metric | Function | str


@short_errors
def as_metrics(
    metrics: Mapping[str, MetricLike] | Sequence[MetricLike] | MetricLike | None,
) -> dict[str, Metric]:
    """Converts the metrics that a user passed to `{name: Metric}`.

    Accepts a mapping of names to metrics, a sequence of metrics, one metric, or None. A metric is a
    `Metric`, a built-in name such as "accuracy" or "top_5", a function that returns per-example
    values, a metric class of clu or metrax, or an `nnx.metrics.Accuracy`. A `Collection` class of
    clu and an `nnx.MultiMetric` are mappings; their average of the loss is left out, as the loop
    reports the loss by that name.

    >>> sorted(as_metrics(["accuracy", top_k(3)]))
    ['accuracy', 'top_3']

    Raises:
      ValueError: a name is unknown, missing, duplicate or reserved for the loop's own values.
      TypeError: something is not a metric.
    """
    if is_collection_class(metrics):
        metrics = members_of(metrics)
    elif is_multi_metric(metrics):
        metrics = members_of_multi(metrics)
    if isinstance(metrics, Mapping):
        pairs = [(name, as_metric(metric)) for name, metric in metrics.items()]
    else:
        listed: Any = [] if metrics is None else metrics
        listed = listed if isinstance(listed, list | tuple) else [listed]
        made = [(metric, as_metric(metric)) for metric in listed]
        pairs = [(_name_of(m if is_nnx_metric(given) else given), m) for given, m in made]
    names = [name for name, _ in pairs]
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"The name of a metric must be a string, got {type(name).__name__}: {name!r:.60}"
            )
        if why := why_taken(name):
            raise ValueError(
                f"A metric cannot be called {name!r}: {why}. Pass a mapping with another name."
                + (f" {_OF_LOSS}" if name == "loss" else "")
            )
        if names.count(name) > 1:
            raise ValueError(f"Two metrics are called {name!r}: pass a mapping with two names.")
    return dict(pairs)


def as_metric(metric: MetricLike) -> Metric:
    """Makes a `Metric` of a name or a function; see `as_metrics`."""
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, str):
        return _by_name(metric)
    if is_collection_class(metric):
        raise TypeError(
            f"A metric must be one metric, got the collection {metric!r:.60} of "
            f"{', '.join(members_of(metric))}: pass it alone, metrics=collection, or pass its "
            "metric classes by name."
        )
    if is_collecting_class(metric):
        return collected(metric)
    if is_metric_class(metric):
        return from_metric_class(metric)
    if is_nnx_metric(metric):
        return from_nnx_metric(metric)
    if isinstance(metric, list | tuple):
        raise TypeError(
            f"Cannot take a list in a list of metrics: {metric!r:.60}. For the metrics of several "
            "outputs pass mappings by the names of the outputs, such as loss={'a': 'mse', 'b': "
            "'crossentropy'} and metrics={'a': ['mae'], 'b': ['accuracy']}."
        )
    refuse_keras(metric, _by_name)
    check_order("metric", metric)
    if isinstance(metric, type) or _is_stateful(metric):
        name = metric.__name__ if isinstance(metric, type) else type(metric).__name__
        raise TypeError(
            f"Cannot use the metric {name} (of {metric.__module__}): a metric must be a pair of "
            "pure functions, and objects that are updated in place cannot be compiled. Use a "
            "built-in metric by name, such as 'accuracy', a function that returns one value per "
            "example, or flaxfit.metrics.Metric(measure, compute)."
        )
    if callable(metric):
        _check_called(metric)
        return mean(metric)
    raise TypeError(
        f"A metric must be a Metric, a name, a function or a metric class, got "
        f"{type(metric).__name__}: {metric!r:.60}"
    )


def on(arguments: Callable[..., tuple[PyTree, ...]], metric: MetricLike) -> Metric:
    """Makes a metric of other arguments than the outputs and targets of the task.

    Args:
      arguments: `(*outputs, *targets) -> (*outputs, *targets)` as the metric wants them: one of
        several outputs, probabilities instead of logits, another shape.
      metric: what `as_metrics` takes.

    >>> import numpy as np
    >>> second = on(lambda a, b, targets: (b, targets), "mse")
    >>> second.compute(second.measure(np.zeros(3), np.ones(3), np.ones(3)))
    0.0
    """
    inner = as_metric(metric)

    def measure(*outputs_and_targets: PyTree, weights: Array | None = None) -> Sums:
        return inner.measure(*arguments(*outputs_and_targets), weights=weights)

    values = inner.values
    return Metric(
        measure,
        inner.compute,
        inner.name,
        values=None if values is None else lambda *given: values(*arguments(*given)),
        mode=inner.mode,
        max_rows=inner.max_rows,
    )


def _by_name(given: str) -> Metric:
    name = known_as(given)
    if match := _TOP.fullmatch(name):
        return top_k(int(match[1]))
    if name == "confusion_matrix":
        return confusion_matrix()
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    if match := _AT_K.fullmatch(name):
        ranking = _BUILT_IN[_RANKINGS.get(match[1], match[1])]
        return ranking(k=int(match[2]), name=name)
    if (match := _AVERAGE.fullmatch(name)) and match[1] in _BUILT_IN:
        return _BUILT_IN[match[1]](average=match[2], name=name)
    if match := _AUC.fullmatch(name):
        average = "weighted" if match[2] else "macro"
        return _BUILT_IN["auc"](multi_class=match[1], average=average, name=name)
    for loss in (given, name):
        if is_loss(loss):
            return mean(resolve(loss), name=given)
    if match := _NEGATED.fullmatch(name):
        own = match[1]
        _by_name(own)  # It may be unknown, too.
        raise ValueError(
            f"There is no metric {given!r}: flaxfit does not negate metrics. Use {own!r} (lower is "
            f"better); callbacks monitor 'val_{own}' with mode='min'."
        )
    if name == "loss":
        raise ValueError(f"There is no metric 'loss'. {_OF_LOSS}")
    if name in ("mean", "sum"):
        raise ValueError(
            f"The metric {given!r} needs a function (outputs, targets) -> values: "
            f"flaxfit.metrics.{name}(f)."
        )
    known = [*_BUILT_IN, *ALIASES, "top_5", "confusion_matrix"]
    nearest = difflib.get_close_matches(name.lower(), known, cutoff=0.5)
    if not nearest and (stem := name.lower().partition("_")[0]) in _BUILT_IN:
        nearest = [stem]  # The average may be misspelled, as in "f1_wieghted".
    advice = f"Did you mean {', '.join(nearest)}?" if nearest else _LISTED
    raise ValueError(f"There is no metric {given!r}. {advice}")


_OF_LOSS = "The loss is reported where it is given as such: EvalTask(..., loss=...)."
_LISTED = "Usual names are accuracy, f1, auc, mse, mae, r2; the page on metrics lists all."


def _check_called(metric: Function) -> None:
    """Refuses a function of flaxfit that makes a metric, where the metric is wanted."""
    name, module = getattr(metric, "__name__", ""), getattr(metric, "__module__", None) or ""
    if module.startswith("flaxfit.metrics.") and metric.__annotations__.get("return") is Metric:
        raise TypeError(
            f"flaxfit.metrics.{name} makes a metric from its options: call it, "
            f"flaxfit.metrics.{name}(...)."
        )


def _is_stateful(metric: object) -> bool:
    """Returns whether it is updated in place, like the metrics of Keras and torchmetrics."""
    protocols = (("update", "compute"), ("update_state", "result"))
    return any(all(hasattr(metric, name) for name in protocol) for protocol in protocols)


def _name_of(metric: MetricLike) -> str:
    if isinstance(metric, str):
        return metric
    name = metric.name if isinstance(metric, Metric) else getattr(metric, "__name__", None)
    if name in (None, "<lambda>"):
        raise ValueError(
            "A metric in a list has no name: pass a mapping instead, {'name': metric}."
        )
    return name
