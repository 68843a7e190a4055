"""How often the outputs name the right class: accuracy and its relatives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flaxfit.metrics._doubts import say, weighed
from flaxfit.metrics._labels import Answers, choices_of, classes_of, floating, labels_of
from flaxfit.metrics._metric import Metric, ratio, weighted, weights_of
from flaxfit.tree._functions import by_row
from flaxfit.tree._types import ArrayLike, Function, PyTree


def mean_of_answers(
    values: Function,
    answers: Callable[..., Answers],
    *,
    name: str,
    configure: Callable[..., Metric] | None = None,
    from_logits: bool = True,
) -> Metric:
    """Makes the weighted mean of the values of answers; NaN where these cannot be counted."""

    def measure(outputs: PyTree, targets: PyTree, *, weights: ArrayLike = None) -> PyTree:
        found = answers(outputs, targets)
        counted, doubts = weighed(found, weights, from_logits=from_logits)
        # Not by the weights alone: XLA makes 0 of False times NaN.
        measured = jnp.where(jnp.isnan(counted), jnp.nan, values(found))
        total = weighted(measured, weights_of(found.is_label, weights)).sum()
        # The total is NaN where it must be; this sum is one that the loss takes, too.
        weight = weights_of(found.is_label, weights).sum()
        return {"sum": total, "weight": weight, "doubts": doubts}

    def compute(sums: PyTree) -> Any:
        say(sums["doubts"], name)
        return ratio(sums["sum"], sums["weight"])

    return Metric(measure, compute, name, configure, by_row(lambda *given: values(answers(*given))))


def _is_right(answers: Answers) -> Any:
    return answers.actual == answers.predicted


def _accuracy(*, threshold: float | None = None, from_logits: bool = True) -> Metric:
    """Makes the share of right predictions; see `accuracy`."""

    def answers(outputs: PyTree, targets: PyTree) -> Answers:
        return classes_of(outputs, targets, threshold=threshold, from_logits=from_logits)

    return mean_of_answers(
        _is_right,
        answers,
        name="accuracy",
        configure=_accuracy,
        from_logits=from_logits,
    )


accuracy = _accuracy()
"""The share of right predictions: integer, one-hot or binary labels, told apart by shape.

Its option `threshold` is the logit above which class 1 of two is predicted. With
`from_logits=False` the outputs are probabilities, and the threshold is 0.5 unless given.
"""


def _binary_accuracy(*, threshold: float | None = None, from_logits: bool = True) -> Metric:
    """Makes the share of right answers; see `binary_accuracy`."""
    name = "binary_accuracy"

    def answers(outputs: PyTree, targets: PyTree) -> Answers:
        options = {"threshold": threshold, "from_logits": from_logits}
        return choices_of(outputs, targets, name=name, **options)

    return mean_of_answers(
        _is_right,
        answers,
        name=name,
        configure=_binary_accuracy,
        from_logits=from_logits,
    )


binary_accuracy = _binary_accuracy()
"""The share of right answers among many yes-or-no questions per example.

Its option `threshold` is the logit above which the answer is yes. With `from_logits=False` the
outputs are probabilities, and the threshold is 0.5 unless given.
"""


def top_k(k: int) -> Metric:
    """Makes the share of examples whose class is among the `k` highest scores.

    >>> import numpy as np
    >>> outputs, labels = np.array([[0.1, 0.7, 0.2], [0.3, 0.5, 0.2]]), np.array([2, 2])
    >>> top_k(2).compute(top_k(2).measure(outputs, labels))
    0.5

    Raises:
      ValueError: `k` is less than 1, or (when measuring) more than the number of classes.
    """
    if k < 1:
        raise ValueError(f"Cannot look at the top {k} classes: k must be at least 1.")

    def answers(outputs: PyTree, targets: PyTree) -> Answers:
        outputs = floating(outputs)
        labels, is_label = labels_of(outputs, jnp.asarray(targets))
        n_classes = outputs.shape[-1]
        if k > n_classes:
            raise ValueError(f"Cannot look at the top {k} of {n_classes} classes: use a smaller k.")
        return Answers(labels, jax.lax.top_k(outputs, k)[1], n_classes, is_label, outputs)

    def is_among_top_k(answers: Answers) -> Any:
        return (answers.predicted == answers.actual[..., None]).any(-1)

    return mean_of_answers(is_among_top_k, answers, name=f"top_{k}")
