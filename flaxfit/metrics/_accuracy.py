"""Accuracy and its relatives: how often the outputs name the correct class."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flaxfit.losses._shared import floating
from flaxfit.metrics._labels import Answers, binary_answers, class_answers, labels_of
from flaxfit.metrics._metric import Metric, ratio, weighted, weights_of
from flaxfit.metrics._validity import counted_weights, warn_of
from flaxfit.tree import Array, ArrayLike, Sums, by_row


def mean_of_answers(
    values: Callable[[Answers], jax.Array],
    answers: Callable[..., Answers],
    *,
    name: str,
    configure: Callable[..., Metric] | None = None,
    from_logits: bool = True,
) -> Metric:
    """Makes the weighted mean of `values(answers)`, NaN if any answer is invalid."""

    def measure(outputs: Array, targets: Array, *, weights: Array | None = None) -> Sums:
        found = answers(outputs, targets)
        counted, doubts = counted_weights(found, weights, from_logits=from_logits)
        # NaN weights alone would not do: XLA simplifies False * NaN to 0.
        measured = jnp.where(jnp.isnan(counted), jnp.nan, values(found))
        total = weighted(measured, weights_of(found.is_label, weights)).sum()
        # The weight stays finite: it is the sum that the loss computes, which XLA then shares.
        weight = weights_of(found.is_label, weights).sum()
        return {"sum": total, "weight": weight, "doubts": doubts}

    def compute(sums: Sums) -> ArrayLike:
        warn_of(sums["doubts"], name)
        return ratio(sums["sum"], sums["weight"])

    return Metric(measure, compute, name, configure, by_row(lambda *given: values(answers(*given))))


def _is_right(answers: Answers) -> jax.Array:
    return answers.actual == answers.predicted


def _mean_by_threshold(
    name: str,
    answers_of: Callable[..., Answers],
    values: Callable[[Answers], jax.Array] = _is_right,
) -> Metric:
    def configure(*, threshold: float | None = None, from_logits: bool = True) -> Metric:
        def answers(outputs: Array, targets: Array) -> Answers:
            return answers_of(outputs, targets, threshold=threshold, from_logits=from_logits)

        return mean_of_answers(
            values, answers, name=name, configure=configure, from_logits=from_logits
        )

    return configure()


accuracy: Metric = _mean_by_threshold("accuracy", class_answers)
"""The fraction of correct predictions, for integer, one-hot or binary labels (by shape).

Its option `threshold` is the logit above which class 1 of two is predicted. With
`from_logits=False` the outputs are probabilities, and the threshold is 0.5 unless given.
"""


binary_accuracy: Metric = _mean_by_threshold(
    "binary_accuracy", functools.partial(binary_answers, name="binary_accuracy")
)
"""The fraction of correct answers to several yes-or-no questions per example.

Its option `threshold` is the logit above which the answer is yes. With `from_logits=False` the
outputs are probabilities, and the threshold is 0.5 unless given.
"""


hamming_loss: Metric = _mean_by_threshold(
    "hamming_loss",
    functools.partial(binary_answers, name="hamming_loss"),
    lambda answers: ~_is_right(answers),
)
"""The fraction of wrong answers to several yes-or-no questions: 1 - `binary_accuracy`."""


zero_one_loss: Metric = _mean_by_threshold(
    "zero_one_loss", class_answers, lambda answers: ~_is_right(answers)
)
"""The fraction of wrong predictions: 1 - `accuracy`, with the same options."""


def _whole_answers(outputs: Array, targets: Array, **options: Any) -> Answers:
    found = binary_answers(outputs, targets, name="exact_match", **options)
    if found.outputs.ndim < 2:
        raise ValueError(
            "The metric 'exact_match' expects several answers per example, (batch, labels), got "
            f"outputs of shape {found.outputs.shape}: use binary_accuracy for a single one."
        )
    return found._replace(is_label=found.is_label.all(-1))


exact_match: Metric = _mean_by_threshold(
    "exact_match", _whole_answers, lambda answers: _is_right(answers).all(-1)
)
"""Subset accuracy: the fraction of examples with every label correct.

Options as of `binary_accuracy`. The weights are of examples, not of single answers.
"""


def top_k(k: int, **options: Any) -> Metric:
    """Makes a metric: the fraction of examples whose class is among the `k` highest scores.

    Its options are `name` and `ignore_label`, as of every metric.

    >>> import numpy as np
    >>> outputs, labels = np.array([[0.1, 0.7, 0.2], [0.3, 0.5, 0.2]]), np.array([2, 2])
    >>> top_k(2).compute(top_k(2).measure(outputs, labels))
    0.5

    Raises:
      ValueError: `k` is less than 1, or (when measuring) more than the number of classes.
    """
    if k < 1:
        raise ValueError(f"Cannot take the top {k} classes: k must be at least 1.")

    def answers(outputs: Array, targets: Array) -> Answers:
        outputs = floating(outputs)
        labels, is_label = labels_of(outputs, jnp.asarray(targets))
        n_classes = outputs.shape[-1]
        if k > n_classes:
            raise ValueError(f"Cannot take the top {k} of {n_classes} classes: use a smaller k.")
        return Answers(labels, jax.lax.top_k(outputs, k)[1], n_classes, is_label, outputs)

    def is_among_top_k(answers: Answers) -> jax.Array:
        return (answers.predicted == answers.actual[..., None]).any(-1)

    return mean_of_answers(is_among_top_k, answers, name=f"top_{k}")(**options)
