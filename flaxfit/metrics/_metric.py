"""Metric: sums measured on a device, and a value computed from them on the host."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.metrics._monitor import RESERVED, mode_of
from flaxfit.tree import (
    Array,
    ArrayLike,
    Function,
    Sums,
    broadcast_weights,
    joined_weights,
    parameters,
)


def why_taken(name: str) -> str:
    """Returns why a user's metric cannot have a name, or ""."""
    if name in RESERVED:
        return "the loop reports its own number under that name"
    return "it would pass for a number of validation" if name.startswith("val_") else ""


@dataclasses.dataclass(frozen=True)
class Metric:
    """A pair of pure functions: `measure` returns additive sums, `compute` their value.

    `measure(*outputs, *targets, weights=None)` returns a pytree of arrays that add over batches,
    devices and hosts. It is traced. `weights` is None or has the shape `(batch,)`, or more leading
    axes of the values, such as `(batch, tokens)`; an example of weight 0 is padding and must not
    affect the sums, even if it holds NaN.

    `compute(sums)` receives the added sums as NumPy arrays and returns a number or an array. It
    divides, so it runs once, at the end.

    With `max_rows`, `measure` returns rows instead, which are concatenated on the host; see
    `collected`.

    Calling a metric sets its options, for the built-in ones that have any:
    `precision(average="macro")`. Each has the options `name`, for a list of metrics, and
    `ignore_label`: targets of that value, such as the -100 of padded tokens, do not count.

    >>> largest_score = mean(lambda outputs, targets: outputs.max(-1), name="largest_score")
    >>> sums = largest_score.measure(np.eye(2), np.zeros(2), weights=np.array([1.0, 3.0]))
    >>> largest_score.compute(sums)
    1.0

    Args:
      measure: `(*outputs, *targets, weights=None) -> sums`.
      compute: `sums -> value`.
      name: the name of the metric in a list of metrics.
      configure: makes the metric with other options.
      values: the function that the metric is the mean of, if it is one.
      mode: "min" or "max" if lower or higher values are known to be better; by default as for a
        loss of flaxfit or Optax in `values`, or for `name`.
      max_rows: the most rows that are kept on the host of a metric of all outputs at once, which
        is measured in evaluation only; None: the metric is computed from sums.
    """

    measure: Function
    compute: Callable[[Sums], ArrayLike]
    name: str | None = None
    configure: Callable[..., "Metric"] | None = None
    values: Function | None = None
    mode: str | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in (None, "min", "max"):
            raise ValueError(f"mode must be 'min', 'max' or None, got {self.mode!r}.")
        if self.mode is None:
            object.__setattr__(self, "mode", mode_of(self.values, self.name))

    def __repr__(self) -> str:
        return f"Metric({self.name or getattr(self.measure, '__name__', 'measure')})"

    def __call__(self, *given: object, **options: Any) -> "Metric":
        """Returns this metric with more options set; earlier options stay."""
        if given:
            first = next(iter(self._options()), "name")
            raise TypeError(
                f"The metric {self.name!r} is called with options by name, such as {first}=..., "
                "and makes a metric. The value of arrays is "
                "metric.compute(metric.measure(outputs, targets))."
            )
        options = _in_our_words(options)
        if not options:
            return self
        if (name := options.pop("name", None)) is not None:
            return _named(self(**options), name)
        known = self._options()
        if "ignore_label" not in known and "ignore_label" in options:
            label, metric = options.pop("ignore_label"), self(**options)
            return metric if label is None else _ignoring(metric, label)
        unknown = [name for name in options if name not in known]
        if self.configure is None or unknown:
            advice = "".join(f" {_ADVICE[name]}" for name in unknown if name in _ADVICE)
            raise TypeError(
                f"The metric {self.name!r} has no option {', '.join(unknown)}: "
                f"it has {', '.join(known) or 'none'}.{advice}"
            )
        # Options that are given later add to these.
        configure = functools.partial(self.configure, **options)
        return dataclasses.replace(self.configure(**options), configure=configure)

    def _options(self) -> list[str]:
        return [*parameters(self.configure)]


OF_KERAS = {
    "thresholds": "threshold",
    "ignore_class": "ignore_label",
    "multi_label": "multilabel",
    "target_class_ids": "class_id",
    "class_aggregation": "average",
    **dict.fromkeys(("recall", "precision", "specificity", "sensitivity"), "least"),
}
"""Options of Keras that have another name here."""
_ADVICE = {
    "curve": "The area under the precision-recall curve is flaxfit.metrics.pr_auc.",
    "num_thresholds": "All scores count as thresholds: leave it out.",
    "summation_method": "All scores count as thresholds: leave it out.",
    "dtype": "Sums are of float32, and divided in float64.",
}


def _in_our_words(options: dict[str, Any]) -> dict[str, Any]:
    """Translates Keras's option names, and drops a None that means Keras's default."""
    for name, ours in OF_KERAS.items():
        if name in options and ours in options:
            raise TypeError(f"The options {ours} and {name} are the same: pass one of them.")
    found = {OF_KERAS.get(name, name): value for name, value in options.items()}
    if found.get("dtype", 0) is None:
        del found["dtype"]
    return found


def mean(values: Function, *, name: str | None = None) -> Metric:
    """Makes a metric of a function: the weighted mean of the values it returns.

    Args:
      values: `(*outputs, *targets) -> values` of shape `(batch, ...)`. All elements of an example
        count with the weight of the example, or each with its own. Or `(values, weights)`: then
        these weights also count, such as a mask of the tokens.
      name: the name of the metric; by default the function's name.

    >>> bias = mean(lambda outputs, targets: outputs - targets)
    >>> bias.compute(bias.measure(np.array([1.0, 5.0]), np.array([0.0, 1.0])))
    2.5
    """
    name = name or getattr(values, "__name__", None)
    measure = _summed(values, name)
    return Metric(measure, lambda sums: ratio(sums["sum"], sums["weight"]), name, values=values)


def sum(values: Function, *, name: str | None = None, mode: str | None = None) -> Metric:
    """Makes a metric of a function: the weighted sum of the values it returns, not their mean.

    >>> clicks = sum(lambda outputs, targets: targets, name="clicks")
    >>> clicks.compute(clicks.measure(np.zeros(2), np.array([3.0, 5.0])))
    8.0

    Args:
      values: as in `mean`.
      name: the name of the metric; by default the function's name.
      mode: "min" or "max" if lower or higher values are better.
    """
    name = name or getattr(values, "__name__", None)
    return Metric(_summed(values, name), lambda sums: float(sums["sum"]), name, mode=mode)


def _summed(values: Function, name: str | None) -> Function:
    """Measures the weighted sum of the values that a function returns, and their weight."""

    def measure(*arguments: ArrayLike, weights: Array | None = None) -> Sums:
        found = values(*arguments)
        own = None
        if isinstance(found, tuple) and len(found) == 2 and all(map(np.ndim, found)):
            found, own = map(jnp.asarray, found)
        if not hasattr(found, "shape") and not isinstance(found, list | int | float):
            raise TypeError(
                f"The metric {name!r} returned {type(found).__name__}; expected one value per "
                "example, of shape (batch, ...). Return the array, or pass a "
                "Metric(measure, compute)."
            )
        found = jnp.asarray(found)
        if found.ndim == 0:
            raise ValueError(
                f"The metric {name!r} returned a scalar; expected one value per example, of shape "
                "(batch, ...). Leave the mean to flaxfit (it weighs the examples), or pass a "
                "Metric(measure, compute), or metrics.collected(f) for a function of all outputs "
                "at once."
            )
        if own is not None:
            own = own.astype(jnp.promote_types(found.dtype, jnp.float32))
            weights = joined_weights(own, weights, found.shape, f"The metric {name!r}")
        weights = weights_of(found, weights)
        return {"sum": weighted(found, weights).sum(), "weight": weights.sum()}

    return measure


def weights_of(values: Array, weights: Array | None = None) -> jax.Array:
    """Returns a float weight for every element, from weights of examples or tokens."""
    dtype = jnp.promote_types(jnp.result_type(values), jnp.float32)
    if weights is None:
        return jnp.ones(values.shape, dtype)
    return broadcast_weights(weights.astype(dtype), values.shape, "A metric")


def _ignoring(metric: Metric, label: int) -> Metric:
    """Makes a metric ignore the targets that equal a label."""
    if metric.max_rows is not None:
        raise TypeError(
            f"The metric {metric.name!r} has no option ignore_label: leave such targets out in the "
            "function that it calls, or give them the weight 0."
        )

    def measure(*arguments: ArrayLike, weights: Array | None = None) -> Sums:
        *outputs, targets = arguments
        targets = jnp.asarray(targets)
        counts = targets != label
        own = joined_weights(
            counts.astype(jnp.float32), weights, targets.shape, f"The metric {metric.name!r}"
        )
        return metric.measure(*outputs, jnp.where(counts, targets, 0), weights=own)

    configure = _changed(metric.configure, lambda other: _ignoring(other, label))
    return dataclasses.replace(metric, measure=measure, configure=configure, values=None)


def _named(metric: Metric, name: str) -> Metric:
    """Renames a metric; the name also stays when options are set later."""
    configure = _changed(metric.configure, lambda other: _named(other, name))
    return dataclasses.replace(metric, name=name, configure=configure)


def _changed(
    configure: Callable[..., Metric] | None, change: Callable[[Metric], Metric]
) -> Callable[..., Metric] | None:
    """Wraps `configure` so that a reconfigured metric is changed in the same way."""
    if configure is None:
        return None

    @functools.wraps(configure)
    def configured(**options: Any) -> Metric:
        return change(configure(**options))

    return configured


def weighted(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns `values * weights`, and 0 where the weight is 0 even if the value is NaN."""
    return jnp.where(weights != 0, values.astype(weights.dtype) * weights, 0)


def ratio(numerator: ArrayLike, denominator: ArrayLike, otherwise: ArrayLike = np.nan) -> ArrayLike:
    """Divides on the host without warnings; a denominator of zero gives `otherwise`."""
    numerator, denominator = np.asarray(numerator, float), np.asarray(denominator, float)
    if not numerator.ndim and not denominator.ndim:  # Four times as fast as arrays.
        return numerator.item() / denominator.item() if denominator else otherwise
    with np.errstate(all="ignore"):
        quotient = np.where(denominator != 0, numerator / denominator, otherwise)
    return quotient if quotient.ndim else quotient.item()
