"""Rejects metrics of Keras, and names the counterparts in flaxfit."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flaxfit.metrics._aliases import known_as
from flaxfit.metrics._metric import OF_KERAS
from flaxfit.tree import parameters

_TOP_K = ("TopKCategoricalAccuracy", "SparseTopKCategoricalAccuracy")


def refuse_keras(metric: object, known: Callable[[str], object]) -> None:
    """Rejects a Keras metric, class or object, and names the counterpart that `known` finds."""
    kind = metric if inspect.isclass(metric) else type(metric)
    of_keras = str(kind.__module__).partition(".")[0] in ("keras", "tf_keras")
    if not of_keras or not hasattr(kind, "update_state"):
        return
    config = {} if inspect.isclass(metric) else _config(metric)
    name = known_as(kind.__name__)
    if kind.__name__ in _TOP_K:
        call, name = f"flaxfit.metrics.top_k(k={config.get('k', 5)})", f"top_{config.get('k', 5)}"
    elif config.get("curve") == "PR":
        call, name = "flaxfit.metrics.pr_auc", "pr_auc"
    else:
        try:
            call = _call(name, known(name), config)
        except ValueError:
            return
    raise TypeError(
        f"{kind.__name__} of Keras is updated in place, so it cannot be compiled: use {call} or a "
        f"name, metrics=[{name!r}]. Metrics of classes take logits, unless from_logits=False."
    )


def _config(metric: Any) -> Mapping[str, Any]:
    try:
        return metric.get_config()
    except (AttributeError, NotImplementedError):
        return {}


def _call(name: str, own: Any, config: Mapping[str, Any]) -> str:
    """Returns the call of the counterpart, with the metric object's options that change it."""
    known = parameters(getattr(own, "configure", None))
    given = {OF_KERAS.get(option, option): value for option, value in config.items()}
    options = ", ".join(
        f"{option}={value!r}"
        for option, value in given.items()
        if option in known and value is not None and value != known[option].default
    )
    room = "metrics" if getattr(own, "values", None) is None or known else "losses"
    return f"flaxfit.{room}.{name}" + (f"({options})" if options else "")
