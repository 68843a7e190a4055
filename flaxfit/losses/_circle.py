"""The circle loss of embeddings with labels, which compares the examples of a batch."""

import jax
import jax.numpy as jnp

from flaxfit.losses._shared import check_embeddings, floating, public
from flaxfit.tree import ArrayLike


@public
def circle(
    embeddings: ArrayLike,
    labels: ArrayLike,
    *,
    gamma: float = 80.0,
    margin: float = 0.4,
    remove_diagonal: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Computes the circle loss of embeddings within the batch: it needs `across="batch"`.

    It is `log(1 + N P)`, with s the cosine similarity, m the margin,
    `N = sum(exp(gamma max(s + m, 0) (s - m)))` over the examples of other labels and
    `P = sum(exp(-gamma (1 + m - s) (s - 1 + m)))` over examples of the same label. Y. Sun et al.,
    "Circle Loss: A Unified Perspective of Pair Similarity Optimization", 2020. As in Keras,
    examples of value 0 do not count, such as an example with a unique label.

    Args:
      embeddings: `(batch, features)`, of length 1.
      labels: integers of shape `(batch,)`.
      gamma: the scale.
      margin: the margin of the similarities.
      remove_diagonal: whether to exclude pairs of an example with itself.

    Returns:
      Values, and weights that are 0 where the value is; both of shape `(batch,)`.

    Raises:
      ValueError: the shapes do not match, or the labels are floats.

    >>> import numpy as np
    >>> values, _ = circle(np.eye(2)[[0, 0, 1, 1]], np.array([0, 0, 1, 1]), gamma=1.0)
    >>> np.asarray(values, float).round(3)
    array([0.897, 0.897, 0.897, 0.897])
    """
    check_embeddings("circle", embeddings, labels)
    embeddings, labels = floating(embeddings), jnp.asarray(labels)
    distances = jnp.maximum(1 - embeddings @ embeddings.T, 0)
    is_same = labels[:, None] == labels
    is_positive = is_same & ~jnp.eye(len(labels), dtype=bool) if remove_diagonal else is_same
    near = -gamma * (margin + distances) * (margin - distances)
    far = gamma * jnp.maximum(1 + margin - distances, 0) * (1 - margin - distances)
    has_pairs = is_positive.any(1) & ~is_same.all(1)
    total = _logsumexp(near, is_positive) + _logsumexp(far, ~is_same)
    values = jnp.where(has_pairs, jax.nn.softplus(jnp.where(has_pairs, total, 0)), 0)
    return values, (values > 0).astype(jnp.float32)


def _logsumexp(values: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns the logsumexp of each row over what counts; over all if nothing does (else NaN)."""
    counts |= ~counts.any(1, keepdims=True)
    return jax.nn.logsumexp(values, axis=1, where=counts)
