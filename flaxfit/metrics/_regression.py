"""How far outputs are from targets: squared, absolute and pinball errors, R2; and perplexity."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.losses import _regression as losses
from flaxfit.losses._shared import floating
from flaxfit.metrics._accuracy import mean_of_answers
from flaxfit.metrics._labels import Answers, is_share, labels_of
from flaxfit.metrics._metric import Metric, mean, ratio, weights_of
from flaxfit.metrics._moments import moments, spread, squares
from flaxfit.tree import Array, ArrayLike, Sums, whole_number


def check_numbers(outputs: ArrayLike, targets: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Outputs and targets of one shape, in single precision or more."""
    outputs, targets = jnp.asarray(outputs), jnp.asarray(targets)
    if outputs.shape != targets.shape:
        raise ValueError(
            "A regression metric expects targets of the shape of the outputs, got outputs "
            f"{outputs.shape} and targets {targets.shape}: reshape one of them."
        )
    dtype = jnp.promote_types(jnp.result_type(outputs, targets), jnp.float32)
    return outputs.astype(dtype), targets.astype(dtype)


def _errors(outputs: ArrayLike, targets: ArrayLike) -> jax.Array:
    outputs, targets = check_numbers(outputs, targets)
    return outputs - targets


mse: Metric = mean(lambda outputs, targets: jnp.square(_errors(outputs, targets)), name="mse")
"""The mean squared error."""

mae: Metric = mean(lambda outputs, targets: jnp.abs(_errors(outputs, targets)), name="mae")
"""The mean absolute error."""

rmse: Metric = Metric(mse.measure, lambda sums: float(np.sqrt(mse.compute(sums))), "rmse")
"""The root mean squared error."""


_AVERAGES = ("uniform_average", "variance_weighted_average", None)


def _r2(*, average: str | None = "uniform_average", num_regressors: int = 0) -> Metric:
    if average not in _AVERAGES:
        raise ValueError(f"The average of 'r2' must be one of {_AVERAGES}, got {average!r}.")
    whole_number("num_regressors", num_regressors, least=0)

    def measure(outputs: Array, targets: Array, *, weights: Array | None = None) -> Sums:
        errors = _errors(outputs, targets)
        by_value = weights_of(errors, weights)
        return {
            "errors": moments(errors, by_value),
            "targets": moments(jnp.asarray(targets).astype(errors.dtype), by_value),
            "n": (by_value != 0).reshape(len(by_value), -1).any(-1).sum(),
        }

    def compute(sums: Sums) -> ArrayLike:
        errors, spreads = squares(sums["errors"]), spread(sums["targets"])
        found = 1 - np.asarray(ratio(errors, spreads, np.where(errors == 0, 0.0, 1.0)))
        if num_regressors:
            n = int(sums["n"])
            found = 1 - (1 - found) * ratio(n - 1, n - 1 - num_regressors)
        if average is None:
            return found
        if average == "uniform_average" or not spreads.any():
            return float(np.mean(found))
        return float(np.average(found, weights=spreads))

    return Metric(measure, compute, "r2", _r2)


r2: Metric = _r2()
"""The coefficient of determination, averaged over several outputs.

Targets far from zero (years, prices in cents) lose no precision. For a constant target it is 1 if
the outputs equal that constant, and 0 otherwise. `average="variance_weighted_average"` weights
outputs by the variance of their targets; None returns an array, by output. `num_regressors=p` is
adjusted R2, `1 - (1 - r2) (n - 1) / (n - p - 1)`, for `n` examples of nonzero weight.
"""


def _perplexity(*, from_logits: bool = True) -> Metric:
    def answers(outputs: Array, targets: Array) -> Answers:
        outputs = floating(outputs)
        labels, is_label = labels_of(outputs, jnp.asarray(targets))
        found = Answers(labels, outputs, outputs.shape[-1], is_label, outputs)
        if not from_logits:
            return found
        adds_up = jnp.abs(outputs.sum(-1, keepdims=True) - 1) < 0.01
        return found._replace(is_probable=is_share(outputs) & adds_up)

    def surprise(answers: Answers) -> jax.Array:
        log = jax.nn.log_softmax(answers.outputs) if from_logits else jnp.log(answers.outputs)
        return -jnp.take_along_axis(log, answers.actual[..., None], -1)[..., 0]

    mean = mean_of_answers(surprise, answers, name="perplexity", from_logits=from_logits)

    def compute(sums: Sums) -> float:
        with np.errstate(over="ignore"):
            return float(np.exp(mean.compute(sums)))

    return dataclasses.replace(mean, compute=compute, configure=_perplexity, values=None)


perplexity: Metric = _perplexity()
"""The exponential of the mean cross-entropy of integer or one-hot labels under the logits.

With `from_logits=False` the outputs are probabilities.
"""


def _poisson_deviance(outputs: ArrayLike, targets: ArrayLike) -> Array:
    outputs, targets = check_numbers(outputs, targets)
    values = 2 * (jax.scipy.special.xlogy(targets, targets / outputs) - targets + outputs)
    return jnp.where((targets >= 0) & (outputs > 0), values, jnp.nan)


mean_poisson_deviance: Metric = mean(_poisson_deviance, name="mean_poisson_deviance")
"""The mean of `2 (t log(t / o) - t + o)` of positive outputs and targets of at least 0.

The outputs are rates, not their logarithms.
"""


def _quantile_loss(*, quantile: float = 0.5) -> Metric:
    if not 0 <= quantile <= 1:
        raise ValueError(f"The quantile must lie between 0 and 1, got {quantile}.")

    def pinball(outputs: ArrayLike, targets: ArrayLike) -> Array:
        outputs, targets = check_numbers(outputs, targets)
        above = targets - outputs
        return jnp.maximum(quantile * above, (quantile - 1) * above)

    metric = mean(pinball, name="quantile_loss")
    return Metric(metric.measure, metric.compute, metric.name, _quantile_loss)


quantile_loss: Metric = _quantile_loss()
"""The mean pinball loss, `max(q (t - o), (q - 1) (t - o))`, q the `quantile`.

With the default, `quantile=0.5`, it is half the mean absolute error.
"""


def _cosine_similarity(*, axis: int = -1) -> Metric:
    def cosine(outputs: ArrayLike, targets: ArrayLike) -> Array:
        return -losses.cosine_similarity(outputs, targets, axis=axis)

    metric = mean(cosine, name="cosine_similarity")
    return dataclasses.replace(metric, configure=_cosine_similarity)


cosine_similarity: Metric = _cosine_similarity()
"""The mean cosine of the angle between vectors along an axis: 1 where they agree, as in Keras.

The loss of that name is its negative.
"""
