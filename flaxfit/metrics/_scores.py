"""Scores that areas under curves rank: of each class against the others, or of each label."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.metrics._labels import (
    Answers,
    binary_answers,
    binary_scores,
    is_share,
    one_class_answers,
    one_class_scores,
)
from flaxfit.metrics._validity import counted_weights
from flaxfit.tree import Array, ArrayLike, broadcast_weights


class Scores(NamedTuple):
    """Scores to rank, `(..., columns)`: a column for each class; a single one for two classes."""

    scores: jax.Array
    actual: jax.Array
    """1 where the class is actual, else 0."""
    weights: jax.Array
    is_probable: jax.Array
    """Whether each row looks like probabilities where logits are expected: `(...)`."""
    doubts: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Ranked:
    """The name and the options of a metric that ranks scores."""

    name: str
    average: str | None
    multi_class: str | None
    multilabel: bool
    from_logits: bool
    label_weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.average not in ("macro", "weighted", None):
            raise ValueError(
                f"The average of {self.name!r} must be 'macro', 'weighted' or None, got "
                f"{self.average!r}."
            )
        if self.multi_class not in (None, "ovr"):
            raise ValueError(
                f"The multi_class of {self.name!r} must be 'ovr' (each class against the others) "
                f"or None, got {self.multi_class!r}."
            )
        if self.multi_class and self.multilabel:
            raise ValueError(
                f"The metric {self.name!r} takes one class per example (multi_class='ovr') or "
                "several labels (multilabel=True): pass one of the two."
            )
        if self.label_weights is not None and not (self.multilabel or self.multi_class):
            raise ValueError(
                f"label_weights of {self.name!r} weigh the areas of several labels: pass "
                "multilabel=True, too."
            )
        if self.label_weights is not None and self.average != "macro":
            raise ValueError(
                f"label_weights of {self.name!r} weigh the mean over labels: leave "
                f"out average={self.average!r}."
            )

    def scores(self, outputs: Array, targets: Array, weights: Array | None) -> Scores:
        """Returns the scores of a batch."""
        found, from_logits = self._answers(outputs, targets)
        weights, doubts = counted_weights(found, weights, from_logits=from_logits)
        scores, actual = found.outputs, found.actual
        may_be = jnp.zeros(scores.shape[:1], bool)
        if found.is_probable is not None:
            may_be = (found.is_probable & (scores != 0)).all(-1)
            scores = one_class_scores(scores)
        if found.actual.dtype != bool:  # A single score.
            scores, actual, weights = scores[..., None], actual[..., None], weights[..., None]
        weights = broadcast_weights(weights, scores.shape)
        return Scores(scores, jnp.asarray(actual, jnp.float32), weights, may_be, doubts)

    def _answers(self, outputs: Array, targets: Array) -> tuple[Answers, bool]:
        """Returns the answers by class, and whether their outputs may lie outside [0, 1]."""
        shape = jnp.shape(outputs)
        if self.multilabel:
            if len(shape) < 2:
                raise ValueError(
                    f"With multilabel=True the metric {self.name!r} expects outputs and labels "
                    f"(batch, labels), got outputs {shape}."
                )
            found = binary_answers(outputs, targets, name=self.name)
            return found._replace(is_probable=None), self.from_logits
        if self.multi_class is None or len(shape) < 2 or shape[-1] < 3:
            return binary_scores(outputs, targets, name=self.name), True
        found = one_class_answers(outputs, targets, from_logits=self.from_logits)
        if not self.from_logits:
            return found, False
        adds_up = jnp.abs(found.outputs.sum(-1, keepdims=True) - 1) < 0.01
        return found._replace(is_probable=is_share(found.outputs) & adds_up), True

    def averaged(self, values: ArrayLike, positives: ArrayLike) -> ArrayLike:
        """Averages the per-column values, ignoring NaN.

        The weight of a class is NaN if an example was invalid; then the result is NaN, too.
        """
        values, positives = np.asarray(values), np.asarray(positives)
        if len(values) == 1:
            return values.item()
        if self.average is None:
            return values
        counts = ~np.isnan(values) | np.isnan(positives)
        if not counts.any():
            return np.nan
        weights = positives if self.average == "weighted" else self.label_weights
        if weights is not None and len(weights) != len(values):
            raise ValueError(
                f"The metric {self.name!r} has {len(values)} labels, and there are {len(weights)} "
                "label_weights."
            )
        weights = None if weights is None else np.asarray(weights)[counts]
        return float(np.average(values[counts], weights=weights))
