"""Losses, metrics and weights of a model with several outputs, by the names of the outputs."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flaxfit import losses, metrics


class WeightsByOutput(struct.PyTreeNode):
    """Weights of the examples for some of the outputs; it travels behind the targets of a batch.

    They are of mean 1 over the data, so that the mean over its examples of weight times loss is
    the weighted mean of the loss, over all of the data.
    """

    by_name: dict[str, Any]


def with_weights(data: Any, loss: Any) -> Any:
    """Data whose weights are by output, as its loss takes them; other data as it is.

    Args:
      data: `(x, y, weights)`, or anything else.
      loss: that of the task.

    Raises:
      ValueError: there is no loss by the name of an output that has weights.
    """
    if not isinstance(data, tuple) or not isinstance(data[2], Mapping):
        return data
    x, y, weights = data
    known = list(loss.losses) if isinstance(loss, LossByOutput) else []
    if unknown := [name for name in weights if name not in known]:
        raise ValueError(
            f"There are weights for {', '.join(map(repr, unknown))}, and losses by name for "
            f"{', '.join(map(repr, known)) or 'no output'}: give sample_weight as one array, or "
            "losses in a mapping by the same names."
        )
    scaled = {name: w / (np.mean(w) or 1) for name, w in weights.items()}
    targets = y if isinstance(y, tuple) else (y,)
    return x, (*targets, WeightsByOutput(scaled)), None


@dataclasses.dataclass(frozen=True, eq=False)
class LossByOutput:
    """The weighted sum of the losses of several outputs: one value per example.

    The model gives a mapping with the names, or a tuple in their order; so do the targets.

    >>> loss = as_loss({"a": "mse", "b": "mae"}, {"b": 0.5})
    >>> loss(jnp.full(2, 3.0), jnp.full(2, 4.0), jnp.zeros(2), jnp.zeros(2))
    Array([11., 11.], dtype=float32)
    """

    losses: Mapping[str, losses.Loss]
    weights: Mapping[str, float]

    def __call__(self, *outputs_and_targets: Any) -> Any:
        """The weighted sum over the outputs."""
        total = 0
        for name, weight in self.weights.items():
            values = self.of(name, *outputs_and_targets)
            own = _own_weights(name, outputs_and_targets)
            total += weight * (values if own is None else jnp.where(own != 0, own * values, 0))
        return total

    def of(self, name: str, *outputs_and_targets: Any) -> Any:
        """The loss of one output: the mean over its elements, for each example."""
        output, target = self.pick(name, *outputs_and_targets)
        n = jax.tree.leaves(output)[0].shape[0]
        try:
            values = jnp.asarray(self.losses[name](output, target))
            losses.check_loss_shape(values.shape, output, target, n)
        except ValueError as error:
            raise ValueError(f"output {name!r}: {error}") from error
        if not values.ndim:
            raise ValueError(
                f"output {name!r}: the loss returned a scalar; of several outputs each needs a "
                f"loss with one value per example, of shape ({n},)."
            )
        return values.reshape(n, -1).mean(1)

    def pick(self, name: str, *outputs_and_targets: Any) -> tuple[Any, Any]:
        """One output and its target, among all outputs and all targets."""
        outputs, rest = self._by_name(_without_weights(*outputs_and_targets))
        targets, more = self._by_name(rest)
        if outputs is None or targets is None or more:
            shapes = jax.tree.map(jnp.shape, outputs_and_targets)
            raise ValueError(
                f"Losses by the names {', '.join(self.losses)} want the outputs of the model, and "
                f"the targets, as a mapping with these names or as a tuple of {len(self.losses)}; "
                f"got outputs and targets of shapes {', '.join(map(str, shapes))}."
            )
        for role, found in ("output", outputs), ("target", targets):
            if name not in found:
                raise ValueError(
                    f"There is a loss for {name!r}, but no such {role}: there are "
                    f"{', '.join(map(repr, found))}."
                )
        return outputs[name], targets[name]

    def _by_name(self, values: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The values by name, and what comes behind them."""
        if values and isinstance(values[0], Mapping):
            return values[0], values[1:]
        n = len(self.losses)
        if len(values) < n:
            return None, ()
        return dict(zip(self.losses, values, strict=False)), values[n:]


def as_loss(loss: Any, weights: Any = None) -> Any:
    """The loss that a user means: a name or a function, or several in a mapping or a sequence.

    Raises:
      ValueError: a name is unknown, or weights are given for other losses than there are.
    """
    if isinstance(loss, LossByOutput):
        return loss if weights is None else as_loss(loss.losses, weights)
    if not isinstance(loss, Mapping | list | tuple):
        if weights is not None:
            raise ValueError(
                f"loss_weights={weights!r} weigh the losses of several outputs, and there is one "
                f"loss, {loss!r:.60}: give a mapping, such as loss={{'a': 'mse', 'b': 'mae'}}."
            )
        return losses.resolve(loss)
    if not loss:
        raise ValueError("There is no loss: name one for each output that is to be trained.")
    if not isinstance(loss, Mapping):
        loss = {f"output_{i}": each for i, each in enumerate(loss)}
    if weights is not None and not isinstance(weights, Mapping):
        if len(weights) != len(loss):
            raise ValueError(f"There are {len(loss)} losses, but {len(weights)} loss_weights.")
        weights = dict(zip(loss, weights, strict=True))
    if unknown := [name for name in weights or () if name not in loss]:
        raise ValueError(
            f"loss_weights name {', '.join(map(repr, unknown))}, and there are losses for "
            f"{', '.join(map(repr, loss))}."
        )
    return LossByOutput(
        {name: losses.resolve(each) for name, each in loss.items()},
        {name: (weights or {}).get(name, 1.0) for name in loss},
    )


def as_metrics(given: Any, loss: Any) -> dict[str, metrics.Metric]:
    """The metrics by name; of several outputs, the loss of each is one of them.

    Where a name of a mapping is that of an output, its metrics see that output and its target
    alone, and are called "<output>_<metric>".
    """
    if not isinstance(loss, LossByOutput):
        return metrics.as_metrics(given)
    found = {}
    for name in loss.losses:
        each = metrics.mean(functools.partial(loss.of, name), name=f"{name}_loss")
        found[f"{name}_loss"] = _MetricByOutput.of(each, name)
    if isinstance(given, Mapping):
        of_outputs = {name: each for name, each in given.items() if name in loss.losses}
        given = {name: each for name, each in given.items() if name not in of_outputs}
        for output, listed in of_outputs.items():
            pick = functools.partial(loss.pick, output)
            for name, metric in metrics.as_metrics(listed).items():
                picked = metrics.on(pick, metric)
                found[f"{output}_{name}"] = _MetricByOutput.of(picked, output)
    for name, metric in metrics.as_metrics(given).items():
        if not isinstance(metric, _MetricByOutput):  # As it is in a task that is replaced.
            metric = _MetricByOutput.of(metrics.on(_without_weights, metric))
        found[name] = metric
    return found


class _MetricByOutput(metrics.Metric):
    """A metric that knows of the weights that may stand behind the targets."""

    @classmethod
    def of(cls, metric: metrics.Metric, output: str | None = None) -> "_MetricByOutput":
        """A metric of one output, with the weights of that output, or of all of them."""

        def measure(*outputs_and_targets: Any, weights: Any = None) -> Any:
            own = _own_weights(output, outputs_and_targets)
            if own is not None:
                weights = own if weights is None else own * weights
            return metric.measure(*outputs_and_targets, weights=weights)

        return cls(measure, metric.compute, metric.name, values=metric.values)


def _own_weights(output: str | None, outputs_and_targets: tuple[Any, ...]) -> Any:
    """The weights of one output, where such stand behind the targets."""
    last = outputs_and_targets[-1]
    if output is None or not isinstance(last, WeightsByOutput):
        return None
    return last.by_name.get(output)


def _without_weights(*outputs_and_targets: Any) -> tuple[Any, ...]:
    is_weighted = isinstance(outputs_and_targets[-1], WeightsByOutput)
    return outputs_and_targets[:-1] if is_weighted else outputs_and_targets


def check_values(loss: Any, outputs: tuple[Any, ...], targets: tuple[Any, ...]) -> None:
    """Checks on the host that the values of labels suit a loss, or each of several."""
    if not isinstance(loss, LossByOutput):
        losses.check_values(loss, outputs, targets)
        return
    for name, each in loss.losses.items():
        try:
            losses.check_values(each, *loss.pick(name, *outputs, *targets))
        except ValueError as error:
            raise ValueError(f"output {name!r}: {error}") from error
