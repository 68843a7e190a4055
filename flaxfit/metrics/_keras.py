"""Rejects metrics of Keras, and names the counterparts in flaxfit."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flaxfit.losses._keras import call_of, is_of_keras
from flaxfit.metrics._aliases import known_as
from flaxfit.metrics._metric import OF_KERAS

_TOP_K = ("TopKCategoricalAccuracy", "SparseTopKCategoricalAccuracy")


def refuse_keras(metric: object, known: Callable[[str], object]) -> None:
    """Rejects a Keras metric, class or object, and names the counterpart that `known` finds."""
    kind = metric if inspect.isclass(metric) else type(metric)
    if not is_of_keras(kind) or not hasattr(kind, "update_state"):
        return
    config = {} if inspect.isclass(metric) else _config(metric)
    name = known_as(kind.__name__)
    if kind.__name__ in _TOP_K:
        call, name = f"flaxfit.metrics.top_k(k={config.get('k', 5)})", f"top_{config.get('k', 5)}"
    elif config.get("curve") == "PR":
        call, name = "flaxfit.metrics.pr_auc", "pr_auc"
    else:
        try:
            own: Any = known(name)
        except ValueError:
            return
        configure = getattr(own, "configure", None)
        room = "losses" if configure is None and own.values is not None else "metrics"
        call = call_of(f"flaxfit.{room}.{name}", config, OF_KERAS, configure)
    raise TypeError(
        f"{kind.__name__} of Keras is updated in place, so it cannot be compiled: use {call} or a "
        f"name, metrics=[{name!r}]. Metrics of classes take logits, unless from_logits=False."
    )


def _config(metric: Any) -> Mapping[str, Any]:
    try:
        return metric.get_config()
    except (AttributeError, NotImplementedError):
        return {}
