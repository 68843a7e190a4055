"""Losses and weights by output, for models with several outputs."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit import losses
from flaxfit.data._batch import Batch
from flaxfit.data._sample_weights import of_output, without_idle_rows
from flaxfit.losses._checks import in_range
from flaxfit.task._label_counts import count_labels, valid_weights
from flaxfit.tree import (
    Array,
    ArrayLike,
    PyTree,
    Sums,
    beside,
    is_named,
    joined_weights,
    which_count,
)


@dataclasses.dataclass(frozen=True, eq=False)
class LossByOutput:
    """The weighted sum of the losses of several outputs: one value per example.

    Outputs and targets are mappings with the names, or tuples in their order. If some losses
    return weights, it returns `(values, weights by output)`.

    >>> loss = as_loss({"a": "mse", "b": "mae"}, {"b": 0.5})
    >>> loss(jnp.full(2, 3.0), jnp.full(2, 4.0), jnp.zeros(2), jnp.zeros(2))
    Array([11., 11.], dtype=float32)
    """

    losses: Mapping[str, losses.Loss]
    weights: Mapping[str, float]
    names: tuple[str, ...]
    """All outputs in order, including those without a loss."""

    def __post_init__(self) -> None:
        if taken := [name for name in self.names if f"{name}_".startswith("val_")]:
            raise ValueError(
                f"An output cannot be called {taken[0]!r}: {taken[0]}_loss, its loss in training, "
                "would pass for one of validation. Give it another name in the model."
            )

    def __call__(self, *outputs_and_targets: PyTree) -> Any:
        """Computes the weighted sum over the outputs, without weights of examples."""
        found = {name: self.of(name, *outputs_and_targets) for name in self.losses}
        values = sum(w * _by_example(found[name][0]) for name, w in self.weights.items())
        own = {name: weights for name, (_, weights) in found.items() if weights is not None}
        return (values, own) if own else values

    def sums(self, weights: PyTree, *outputs_and_targets: PyTree) -> dict[str, Sums]:
        """Computes `(weighted sum, weight)` of the loss by output."""
        return {
            name: self.sum_of(name, of_output(weights, name), *outputs_and_targets, factor=factor)
            for name, factor in self.weights.items()
        }

    def sum_of(
        self, name: str, weights: Array, *outputs_and_targets: PyTree, factor: float = 1.0
    ) -> Sums:
        """Computes `(factor * weighted sum, weight)` of the loss of one output.

        Values that share a weight, such as the elements of an example, are averaged.
        """
        values, own = self.of(name, *outputs_and_targets)
        if own is not None:
            own = valid_weights(own)
            weights = joined_weights(own, weights, values.shape, f"output {name!r}")
        values = factor * _averaged_to(weights, values, f"output {name!r}")
        return jnp.sum(jnp.where(weights != 0, weights * values, 0)), jnp.sum(weights)

    def of(self, name: str, *outputs_and_targets: PyTree) -> tuple[jax.Array, jax.Array | None]:
        """Computes the values of the loss of one output, and its weights or None."""
        output, target = self.pick(name, *outputs_and_targets)
        n = jax.tree.leaves(output)[0].shape[0]
        try:
            found = in_range(self.losses[name], output, target)
            values, own = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
            values = jnp.asarray(values)
            losses.check_loss_shape(values.shape, output, target, n)
        except ValueError as error:
            raise ValueError(f"output {name!r}: {error}") from error
        if not values.ndim:
            raise ValueError(
                f"output {name!r}: the loss returned a scalar; with several outputs, each loss "
                f"must return one value per example, of shape ({n},)."
            )
        return values, None if own is None else jnp.asarray(own, float)

    def pick(self, name: str, *outputs_and_targets: PyTree) -> tuple[PyTree, PyTree]:
        """Picks one output and its target among all outputs and all targets."""
        outputs, rest = self.by_name(outputs_and_targets)
        targets, more = self.by_name(rest)
        if isinstance(outputs_and_targets[0], Mapping) and len(rest) > 1 and not more:
            raise ValueError(
                f"Cannot tell which of {len(rest)} targets belongs to which of the outputs "
                f"{', '.join(map(repr, outputs or ()))}, as a mapping has no order: pass the "
                f"targets as a mapping, too, such as {{{name!r}: ...}}; columns by "
                f"targets={{{name!r}: column}}."
            )
        if outputs is None or targets is None or more:
            shapes = jax.tree.map(jnp.shape, outputs_and_targets)
            raise ValueError(
                f"Losses and metrics by the names {', '.join(self.losses)} expect the outputs of "
                "the model and the targets as a mapping with these names or as a tuple of "
                f"{len(self.names)}; got outputs and targets of shapes "
                f"{', '.join(map(str, shapes))}. Name all outputs: None stands for no loss, and a "
                "list of metrics may be empty."
            )
        for role, found in ("output", outputs), ("target", targets):
            if name not in found:
                raise ValueError(
                    f"There is a loss for {name!r}, but no such {role}: there are "
                    f"{', '.join(map(repr, found))}."
                )
        return outputs[name], targets[name]

    def without_idle_targets(self, batch: Batch) -> Batch:
        """Replaces the targets of each output in its rows of weight 0, by a row that counts."""
        by_name, more = self.by_name(batch.targets)
        if by_name is None:  # Too few targets: the loss raises an error.
            return batch
        found = {
            name: without_idle_rows(target, of_output(batch.weights, name))
            for name, target in by_name.items()
        }
        is_mapping = len(batch.targets) == 1 + len(more)
        return batch._replace(targets=((found,) if is_mapping else tuple(found.values())) + more)

    def by_name(
        self, values: tuple[PyTree, ...]
    ) -> tuple[Mapping[str, PyTree] | None, tuple[PyTree, ...]]:
        """Splits values into a mapping by name, None if there are too few, and the rest."""
        if values and is_named(values[0]) and not are_numbered(self.names):
            values = values[0]._asdict(), *values[1:]
        if values and isinstance(values[0], Mapping):
            return values[0], values[1:]
        # Targets, which come last, may omit outputs without a loss.
        names = self.names if len(values) >= len(self.names) else tuple(self.losses)
        if len(values) < len(names):
            return None, ()
        return dict(zip(names, values, strict=False)), values[len(names) :]


def are_numbered(names: Iterable[str]) -> bool:
    """Returns whether outputs have the default names of a list of losses, "output_0" and so on."""
    return all(re.fullmatch(r"output_\d+", name) for name in names)


def as_loss(loss: Any, weights: Any = None) -> Any:
    """Resolves a loss given as a name, a function, or several of these by output.

    None among several marks an output without a loss. `weight_of` returns the weight of a single
    loss.
    """
    if isinstance(loss, LossByOutput):
        if weights is None:
            return loss
        loss = {name: loss.losses.get(name) for name in loss.names}
    if not isinstance(loss, Mapping | list | tuple):
        weight_of(loss, weights)
        return losses.resolve(loss)
    if not isinstance(loss, Mapping):
        loss = {f"output_{i}": each for i, each in enumerate(loss)}
    given = {name: each for name, each in loss.items() if each is not None}
    if not given:
        raise ValueError("There is no loss: name one for each output that is to be trained.")
    if is_number(weights):
        weights = dict.fromkeys(given, weights)
    if weights is not None and not isinstance(weights, Mapping):
        if len(weights) != len(loss):
            raise ValueError(f"There are {len(loss)} losses, but {len(weights)} loss_weights.")
        weights = dict(zip(loss, weights, strict=True))
    if unknown := [name for name in weights or () if name not in loss]:
        raise ValueError(
            f"loss_weights contains {', '.join(map(repr, unknown))}, but there are losses only for "
            f"{', '.join(map(repr, loss))}."
        )
    known = {name: each for name, each in (weights or {}).items() if each is not None}
    return LossByOutput(
        {name: losses.resolve(each) for name, each in given.items()},
        {name: known.get(name, 1.0) for name in given},
        tuple(loss),
    )


def weight_of(loss: Any, weights: Any) -> float:
    """Returns the weight of a single loss, given as a number or a list of one; 1 for several."""
    if weights is None or isinstance(loss, LossByOutput):
        return 1.0
    each: Any = weights
    if isinstance(weights, list | tuple) and len(weights) == 1:
        (each,) = weights
    if not is_number(each):
        raise ValueError(
            f"loss_weights={weights!r:.60} are for the losses of several outputs, but there is one "
            f"loss, {loss!r:.60}: give a number, or a loss for each output, such as "
            "loss={'a': 'mse', 'b': 'mae'}."
        )
    return float(each)


def is_number(value: object) -> bool:
    """Returns whether an option is a number other than a bool."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def labels_out_of_range(
    loss: losses.Loss, weights: PyTree, outputs: PyTree, targets: PyTree
) -> dict[str, Sums]:
    """Counts the invalid labels of a loss, or of each loss by output."""
    if not isinstance(loss, LossByOutput):
        return count_labels(loss, weights, (*outputs, *targets))
    found = {}
    for name, each in loss.losses.items():
        picked = loss.pick(name, *outputs, *targets)
        found |= count_labels(each, of_output(weights, name), picked, name)
    return found


def check_outputs(loss: losses.Loss | None, weights: PyTree) -> None:
    """Checks that every output with weights also has a loss by name."""
    if not isinstance(weights, Mapping):
        return
    known = list(loss.names) if isinstance(loss, LossByOutput) else []
    if unknown := [name for name in weights if name not in known]:
        raise ValueError(
            f"There are weights for {', '.join(map(repr, unknown))}, but losses by name for "
            f"{', '.join(map(repr, known)) or 'no output'}: pass the weights as one array, or "
            "losses in a mapping with the same names."
        )


def check_values(loss: losses.Loss, outputs: tuple[PyTree, ...], batch: Batch) -> None:
    """Checks, on the host, that labels of nonzero weight are valid for their losses."""
    if not isinstance(loss, LossByOutput):
        losses.check_values(loss, outputs, _counted(batch.targets, batch.weights))
        return
    for name, each in loss.losses.items():
        output, target = loss.pick(name, *outputs, *batch.targets)
        try:
            losses.check_values(each, output, _counted(target, of_output(batch.weights, name)))
        except ValueError as error:
            raise ValueError(f"output {name!r}: {error}") from error


def targets_with_weights(loss: Any, batch: Batch) -> Iterator[tuple[PyTree, PyTree]]:
    """Yields the targets of a batch with their weights or None, by output if weights are."""
    if not isinstance(batch.weights, Mapping):
        yield batch.targets, batch.weights
        return
    by_name, _ = loss.by_name(batch.targets)
    for name, target in (by_name or {}).items():  # None: the loss raises an error.
        yield {name: target}, of_output(batch.weights, name)


def _counted(targets: PyTree, weights: Array | None) -> PyTree:
    """Returns the elements of targets with nonzero weight."""
    if weights is None or np.all(np.asarray(weights) != 0):
        return targets

    def counted(target: ArrayLike) -> np.ndarray:
        target = np.asarray(target)
        return target[np.broadcast_to(which_count(np.asarray(weights), target.shape), target.shape)]

    return jax.tree.map(counted, targets)


def _averaged_to(weights: Array, values: jax.Array, owner: str) -> jax.Array:
    """Averages values over the axes that weights lack."""
    fitted = beside(weights, values.shape, owner).shape
    axes = tuple(i for i, n in enumerate(values.shape) if fitted[i] != n)
    lead = values.ndim - len(axes)
    if axes == tuple(range(lead, values.ndim)):
        values, axes = values.reshape(*values.shape[:lead], -1), (lead,)
    return values.mean(axes).reshape(weights.shape)


def _by_example(values: jax.Array) -> jax.Array:
    return values.reshape(len(values), -1).mean(1)
