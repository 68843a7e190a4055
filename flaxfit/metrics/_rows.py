"""Rows of outputs and targets that a metric collects, and the values computed of them."""

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.metrics._metric import Metric
from flaxfit.metrics._monitor import RESERVED
from flaxfit.tree import Array, ArrayLike, Function, PyTree, Sums, flat

MAX_ROWS = 1_000_000
"""The maximum number of rows that a metric collects by default."""


def collecting(
    name: str | None,
    prepare: Callable[..., tuple[PyTree, Array | None]],
    f: Function,
    configure: Callable[..., Metric] | None = None,
    *,
    takes_weights: bool = True,
    mode: str | None = None,
    max_rows: int = MAX_ROWS,
) -> Metric:
    """Makes a metric of all rows at once, computed on the host; NaN without rows.

    `prepare(*outputs, *targets, weights=None)` returns the arrays of a batch to keep, and weights.
    `f` takes these arrays of all batches, and `weights` by name if `takes_weights`; it returns a
    value, or values by name.
    """

    @functools.wraps(prepare)  # Errors about the number of arguments show its signature.
    def measure(*arguments: PyTree, weights: Array | None = None) -> Sums:
        kept, weights = prepare(*arguments, weights=weights)
        leaves = flat(kept)
        n = len(next(iter(leaves.values())) if weights is None else weights)
        for path, leaf in leaves.items():
            if jnp.shape(leaf)[:1] != (n,):
                raise ValueError(
                    f"The metric {name!r} collects one row per example, but got an array of shape "
                    f"{jnp.shape(leaf)} ({path}) for {n} examples. Leave it out, by "
                    "flaxfit.metrics.on(arguments, metric)."
                )
        return {"arguments": kept, "weights": jnp.ones(n) if weights is None else weights}

    def compute(rows: Sums) -> ArrayLike | dict[str, ArrayLike]:
        arguments, weights = jax.tree.map(np.asarray, (rows["arguments"], rows["weights"]))
        if not len(weights):
            return math.nan
        if not takes_weights and np.any(weights != 1):
            warnings.warn(
                f"The data has weights, but the metric {name!r} takes none: it leaves out examples "
                "of weight 0 and counts all others equally. The function of collected(f) receives "
                "the weights if it has a parameter `weights`.",
                stacklevel=2,
            )
        value = f(*arguments, weights=weights) if takes_weights else f(*arguments)
        if isinstance(value, Mapping):
            return {str(key): _as_number(f"{name}[{key!r}]", each) for key, each in value.items()}
        return _as_number(str(name), value)

    return Metric(measure, compute, name, configure, mode=mode, max_rows=max_rows)


def values_by_name(name: str, metric: Metric, value: Any) -> dict[str, Any]:
    """Returns the values of a metric by the names under which they are reported; see `collected`.

    >>> metric = Metric(lambda: {}, lambda rows: {"f1": 0.5}, name="scores", max_rows=9)
    >>> values_by_name("scores", metric, {"f1": 0.5}), values_by_name("ner", metric, {"f1": 0.5})
    ({'f1': 0.5}, {'ner_f1': 0.5})
    """
    if not isinstance(value, Mapping):
        return {name: value}
    # An unnamed metric has the name of its function, after the name of an output if there is one.
    prefix = name.removesuffix(metric.name or "")
    prefix += "_" if prefix and not prefix.endswith("_") else ""
    return {f"{prefix}{key}": each for key, each in value.items()}


def check_values(found: Mapping[str, Any], others: Mapping[str, Any], name: str) -> None:
    """Checks that no value of a metric has the name of another metric, or of the loop."""
    for key in found:
        if key in others or key in RESERVED:
            raise ValueError(
                f"The metric {name!r} returned the key {key!r}, which is already the name of a "
                "metric. Return another key, or name the metric in a mapping, such as "
                "metrics={'all': collected(f)}, for 'all_" + key + "'."
            )


def _as_number(name: str, value: Any) -> Any:
    array = np.asarray(value) if hasattr(value, "dtype") or isinstance(value, int | float) else None
    if array is None or array.dtype.kind not in "biuf":
        raise TypeError(
            f"The collected metric {name} returned {type(value).__name__}: {value!r:.60}; expected "
            "a number, or a mapping of numbers by name. Pick one, such as "
            "scipy.stats.spearmanr(outputs, targets).statistic."
        )
    return array if array.ndim else float(array)
