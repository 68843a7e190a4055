"""Metrics by output, for models with several outputs."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from flaxfit import losses, metrics
from flaxfit.metrics._metric import ratio
from flaxfit.task._multi_output import LossByOutput, are_numbered
from flaxfit.tree import Array, PyTree, Sums, is_named


def as_metrics(given: Any, loss: losses.Loss | None) -> dict[str, metrics.Metric]:
    """Resolves metrics by name; with losses by output, each loss becomes a metric.

    Metrics under the name of an output, or in a list with an item per output, see only that output
    and its target, and are called "<output>_<metric>". With one loss for all outputs, or none,
    these items must be lists, because a single name is then a metric of all outputs.
    """
    given, found = () if given is None else given, {}
    if isinstance(loss, LossByOutput):
        found = {f"{name}_loss": _metric_of_loss(loss, name) for name in loss.losses}
    elif names := _outputs_with_lists(given):
        every: Any = dict.fromkeys(names, loss)  # Used only to pick outputs.
        loss = LossByOutput(every, dict.fromkeys(names, 1.0), tuple(names))
    else:
        is_alone = _is_list(given) and _is_nested(given)  # A nested list for the only output.
        return metrics.as_metrics((given[0] or ()) if is_alone else given)
    given = _by_output(given, list(loss.names))
    if isinstance(given, Mapping):
        of_outputs = {name: each for name, each in given.items() if name in loss.names}
        given = {name: each for name, each in given.items() if name not in of_outputs}
        for output, listed in of_outputs.items():
            pick = functools.partial(loss.pick, output)
            for name, metric in metrics.as_metrics(listed).items():
                picked = metrics.on(pick, metric)
                found[f"{output}_{name}"] = MetricOfOutput(**{**vars(picked), "output": output})
    return found | metrics.as_metrics(given)


def _outputs_with_lists(given: Any) -> list[str]:
    """Returns the outputs that have a list of metrics or None, by name or in order."""
    if isinstance(given, Mapping):
        listed = {n: each for n, each in given.items() if each is None or _is_list(each)}
        return list(listed) if any(map(_is_list, listed.values())) else []
    is_nested = _is_list(given) and len(given) > 1 and _is_nested(given)
    return [f"output_{i}" for i in range(len(given))] if is_nested else []


def _is_nested(given: Any) -> bool:
    return any(each is None or _is_list(each) for each in given)


def _is_list(given: object) -> bool:
    return isinstance(given, list | tuple)


def _by_output(given: Any, names: list[str]) -> Any:
    """Converts lists of metrics in the order of outputs, as in Keras, to a mapping by output."""
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list | tuple) or not given:
        return given
    if not _is_nested(given) and not all(isinstance(each, str) for each in given):
        return given  # Functions and metrics of all outputs together.
    if len(names) == 1 and not _is_nested(given):
        given = [given]
    if len(given) != len(names):
        raise ValueError(
            f"There are {len(names)} outputs ({', '.join(names)}), and metrics for {len(given)}: "
            f"{given!r:.60}. Give a list for each, or a mapping: metrics={{{names[0]!r}: ...}}."
        )
    return dict(zip(names, given, strict=True))


def _metric_of_loss(loss: LossByOutput, name: str) -> "MetricOfOutput":
    """Returns the metric that reports the loss of one output."""

    def measure(*outputs_and_targets: PyTree, weights: Array | None = None) -> Sums:
        if weights is None:
            weights = jnp.ones(len(jax.tree.leaves(outputs_and_targets)[0]))
        total, weight = loss.sum_of(name, weights, *outputs_and_targets)
        return {"sum": total, "weight": weight}

    return MetricOfOutput(
        measure,
        lambda sums: ratio(sums["sum"], sums["weight"]),
        f"{name}_loss",
        values=functools.partial(loss.of, name),
        output=name,
    )


@dataclasses.dataclass(frozen=True)
class MetricOfOutput(metrics.Metric):
    """A metric of one output, measured with the weights of that output."""

    output: str = ""


def with_names(task: Any, outputs: PyTree) -> PyTree:
    """Converts a NamedTuple of outputs to a mapping, if the task names them in another order."""
    if not is_named(outputs):
        return outputs
    of_outputs = [m.output for m in task.metrics.values() if isinstance(m, MetricOfOutput)]
    names = task.outputs or tuple(dict.fromkeys(of_outputs))
    is_in_order = are_numbered(names) or names == outputs._fields
    return outputs if is_in_order else outputs._asdict()


def is_loss_of_output(metric: metrics.Metric) -> bool:
    """Returns whether a metric reports the loss of one output."""
    return isinstance(getattr(getattr(metric.values, "func", None), "__self__", None), LossByOutput)
