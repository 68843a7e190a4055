"""How well probabilities fit labels: log loss, Brier score, calibration."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.metrics._accuracy import mean_of_answers
from flaxfit.metrics._labels import Answers, class_answers
from flaxfit.metrics._metric import Metric, ratio
from flaxfit.metrics._validity import counted_weights, warn_of
from flaxfit.tree import Array, Sums


def _shares(answers: Answers, from_logits: bool) -> tuple[jax.Array, bool]:
    """Returns the probabilities of the classes, or of class 1; and whether they are by class."""
    by_class = answers.outputs.ndim > answers.actual.ndim
    if not from_logits:
        return answers.outputs, by_class
    return (jax.nn.softmax if by_class else jax.nn.sigmoid)(answers.outputs), by_class


def _log_loss(*, from_logits: bool = True) -> Metric:
    def values(answers: Answers) -> jax.Array:
        outputs, actual = answers.outputs, answers.actual
        if outputs.ndim > actual.ndim:
            log = jax.nn.log_softmax(outputs) if from_logits else jnp.log(outputs)
            return -jnp.take_along_axis(log, actual[..., None], -1)[..., 0]
        if from_logits:
            return jax.nn.softplus(jnp.where(actual == 1, -outputs, outputs))
        return -jnp.log(jnp.where(actual == 1, outputs, 1 - outputs))

    answers = functools.partial(class_answers, from_logits=from_logits)
    metric = mean_of_answers(values, answers, name="log_loss", from_logits=from_logits)
    return dataclasses.replace(metric, configure=_log_loss, values=None)


log_loss: Metric = _log_loss()
"""The mean of `-log(p)`, p the probability of the actual class: cross-entropy.

It takes a single score or scores of two or more classes, and integer or one-hot labels. With
`from_logits=False` the outputs are probabilities.
"""


def _brier(*, from_logits: bool = True) -> Metric:
    def values(answers: Answers) -> jax.Array:
        shares, by_class = _shares(answers, from_logits)
        if not by_class:
            return jnp.square(shares - answers.actual)
        squares = jnp.square(shares - jax.nn.one_hot(answers.actual, shares.shape[-1])).sum(-1)
        return squares / 2 if shares.shape[-1] == 2 else squares

    answers = functools.partial(class_answers, from_logits=from_logits)
    metric = mean_of_answers(values, answers, name="brier", from_logits=from_logits)
    return dataclasses.replace(metric, configure=_brier, values=None)


brier: Metric = _brier()
"""The mean of `(p - y)**2`, for class 1 of two classes, else summed over the classes.

With `from_logits=False` the outputs are probabilities.
"""


def _calibration_error(*, n_bins: int = 15, from_logits: bool = True) -> Metric:
    def measure(outputs: Array, targets: Array, *, weights: Array | None = None) -> Sums:
        answers = class_answers(outputs, targets, from_logits=from_logits)
        counted, doubts = counted_weights(answers, weights, from_logits=from_logits)
        shares, by_class = _shares(answers, from_logits)
        share = shares.max(-1) if by_class else shares
        is_right = (answers.predicted == answers.actual) if by_class else answers.actual == 1
        bins = jnp.clip((share * n_bins).astype(int), 0, n_bins - 1)
        share = jnp.where(counted != 0, share, 0)
        parts = jnp.stack([counted, counted * share, counted * is_right])
        sums = jnp.zeros((3, n_bins), counted.dtype).at[:, bins.ravel()]
        return {"bins": sums.add(parts.reshape(3, -1)), "doubts": doubts}

    def compute(sums: Sums) -> float:
        warn_of(sums["doubts"], "calibration_error")
        weight, share, right = np.asarray(sums["bins"], np.float64)
        return float(ratio(np.abs(share - right).sum(), weight.sum()))

    return Metric(measure, compute, "calibration_error", _calibration_error)


calibration_error: Metric = _calibration_error()
"""The expected calibration error: the mean `|confidence - accuracy|` of `n_bins` bins.

The confidence is the probability of the predicted class (Guo et al. 2017), or of class 1 for a
single score, as in torchmetrics.
"""
