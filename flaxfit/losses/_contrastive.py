"""Losses that compare the examples of a batch with each other: train them with `across="batch"`.

If a batch is divided over replicas, `info_nce` computes on each replica the values of its own
examples, against the outputs of all replicas.
"""

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.losses._crossentropy import crossentropy
from flaxfit.losses._shared import check_embeddings, floating, public
from flaxfit.tree import ArrayLike


@public
def info_nce(
    first: ArrayLike,
    second: ArrayLike,
    log_scale: ArrayLike | None = None,
    *,
    temperature: float | None = None,
    normalize: bool = True,
    axis_name: str = "replica",
) -> jax.Array:
    """Computes the symmetric InfoNCE loss of each pair, with all other pairs as negatives.

    It is the mean of two cross-entropies: of `second[i]` among all of `second` for `first[i]`, and
    of `first[i]` among all of `first` for `second[i]`. The logits are dot products of embeddings,
    divided by the temperature.

    van den Oord, Li, Vinyals, "Representation Learning with Contrastive Predictive Coding", 2018;
    Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021
    (CLIP), figure 3.

    >>> info_nce(np.eye(8, 3), np.eye(8, 3), temperature=0.1).shape
    (8,)

    Args:
      first: `(batch, features)`, such as the embeddings of images.
      second: embeddings of the same shape, such as text embeddings.
      log_scale: a scalar that the model learns and returns as a third output: the logits are
        multiplied by `exp(log_scale)`.
      temperature: divides the logits; None: 0.07 without `log_scale`, as in CLIP.
        `info_nce(temperature=0.1)` returns the loss with this option.
      normalize: whether to scale the embeddings to length 1.
      axis_name: the axis of the strategy's replicas. With any other name the loss is the same, but
        every replica computes the whole batch.

    Returns:
      One value per pair, of shape `(batch,)`.

    Raises:
      ValueError: the shapes differ, the temperature is not positive, or `log_scale` is not a scalar
        or is given with a temperature.
    """
    if len(np.shape(first)) != 2 or np.shape(first) != np.shape(second):
        raise ValueError(
            "loss 'info_nce' expects two outputs of one shape (batch, features), whose rows are "
            f"pairs, got {np.shape(first)} and {np.shape(second)}."
        )
    a, b = floating(first), floating(second)
    if normalize:
        a, b = _unit(a), _unit(b)
    a *= _scale(log_scale, temperature)
    numbers, (all_a, all_b) = _of_all_replicas(axis_name, a, b)
    logits = a @ all_b.T
    swapped = logits.T if all_a is a else b @ all_a.T
    return (crossentropy(logits, numbers) + crossentropy(swapped, numbers)) / 2


@public
def supervised_contrastive(
    embeddings: ArrayLike,
    labels: ArrayLike,
    *,
    temperature: float = 0.1,
    normalize: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Computes the supervised contrastive loss of each example: it needs `across="batch"`.

    It is the mean cross-entropy of the examples with the same label among all others. The logits
    are dot products of embeddings, divided by the temperature (Khosla et al., "Supervised
    Contrastive Learning", 2020, equation 2). For several views of an example, stack the embeddings
    and the labels.

    Args:
      embeddings: `(batch, features)`.
      labels: integers of shape `(batch,)`.
      temperature: divides the logits.
      normalize: whether to scale the embeddings to length 1.

    Returns:
      Values, and weights that are 0 where no other example has the label; both of shape `(batch,)`.

    Raises:
      ValueError: the shapes do not match, or the temperature is not positive.

    >>> values, _ = supervised_contrastive(np.eye(2)[[0, 0, 1, 1]], np.array([0, 0, 1, 1]))
    >>> np.asarray(values, float).round(5)
    array([9.e-05, 9.e-05, 9.e-05, 9.e-05])
    """
    check_embeddings("supervised_contrastive", embeddings, labels)
    _check_temperature("supervised_contrastive", temperature)
    x, labels = floating(embeddings), jnp.asarray(labels)
    x = _unit(x) if normalize else x
    is_other = ~jnp.eye(len(labels), dtype=bool)
    is_positive = (labels[:, None] == labels) & is_other
    logits = jnp.matmul(x, x.T, precision="highest") / temperature
    # A batch of one has no others: a logsumexp over nothing has NaN gradients.
    of_others = jax.nn.logsumexp(logits, axis=1, where=is_other | ~is_other.any(1, keepdims=True))
    n_positives = is_positive.sum(1)
    losses = jnp.where(is_positive, of_others[:, None] - logits, 0)
    values = losses.sum(1) / jnp.maximum(n_positives, 1)
    return values, (n_positives > 0).astype(jnp.float32)


def _scale(log_scale: ArrayLike | None, temperature: float | None) -> ArrayLike:
    """Returns the factor of the dot products of embeddings."""
    _check_temperature("info_nce", temperature)
    if log_scale is None:
        return 1 / (0.07 if temperature is None else temperature)
    if np.size(log_scale) != 1:
        raise ValueError(
            "loss 'info_nce' takes two outputs, a learned scalar log_scale as a third, and no "
            f"targets, got a third argument of shape {np.shape(log_scale)}: give empty targets, "
            "as in fit((a, b), ())."
        )
    if temperature is not None:
        raise ValueError(
            f"loss 'info_nce' got temperature={temperature} and the learned log_scale: leave one "
            "of them out."
        )
    return jnp.exp(jnp.reshape(floating(log_scale), ()))


def _check_temperature(name: str, temperature: float | None) -> None:
    if isinstance(temperature, int | float) and not temperature > 0:
        raise ValueError(f"The temperature of {name!r} must be positive, got {temperature}.")


def _unit(x: jax.Array) -> jax.Array:
    """Scales vectors to length 1; a zero vector stays zero, with a finite gradient."""
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, -1, keepdims=True), 1e-24))


def _of_all_replicas(axis_name: str, *rows: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the positions of this replica's rows in the batch, and all replicas' rows."""
    numbers = jnp.arange(len(rows[0]))
    try:
        n_replicas = jax.lax.psum(1, axis_name)
    except NameError:  # Nothing is mapped over such an axis.
        n_replicas = 1
    if n_replicas == 1:  # No gather: a program that names the axis is trusted to use it.
        return numbers, list(rows)
    numbers += jax.lax.axis_index(axis_name) * len(numbers)
    return numbers, [jax.lax.all_gather(x, axis_name, tiled=True) for x in rows]
