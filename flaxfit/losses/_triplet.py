"""The triplet loss of embeddings with labels, which compares the examples of a batch."""

import jax
import jax.numpy as jnp

from flaxfit.losses._shared import check_embeddings, floating, public
from flaxfit.tree import ArrayLike


@public
def triplet(
    embeddings: ArrayLike,
    labels: ArrayLike,
    *,
    margin: float = 1.0,
    mining: str = "semi_hard",
) -> tuple[jax.Array, jax.Array]:
    """Computes the triplet loss of each example as the anchor: it needs `across="batch"`.

    The loss of a triplet is `max(d(anchor, positive) - d(anchor, negative) + margin, 0)`, where d
    is the Euclidean distance. The negative of a pair is, with "semi_hard", the nearest one that is
    farther than the positive, or the farthest one if there is none (Schroff et al., "FaceNet: A
    Unified Embedding for Face Recognition and Clustering", 2015); the value of an anchor is the
    mean over its pairs, and its weight their number. With "hard" an anchor has one triplet, of its
    farthest positive and its nearest negative (Hermans et al., "In Defense of the Triplet Loss for
    Person Re-Identification", 2017, "batch hard").

    Args:
      embeddings: `(batch, features)`; they are not normalized.
      labels: integers of shape `(batch,)`.
      margin: how much farther a negative must be for a loss of 0, as a Euclidean distance.
      mining: "semi_hard" or "hard".

    Returns:
      Values, and weights that are 0 where an example has no positive or no negative; both of shape
      `(batch,)`.

    Raises:
      ValueError: the shapes do not match, or `mining` is unknown.

    >>> import numpy as np
    >>> values, weights = triplet(np.float32([[0], [1], [3]]), np.array([0, 0, 1]), mining="hard")
    >>> np.asarray(values), np.asarray(weights)
    (array([0., 0., 0.], dtype=float32), array([1., 1., 0.], dtype=float32))
    """
    check_embeddings("triplet", embeddings, labels)
    if mining not in ("semi_hard", "hard"):
        raise ValueError(
            f"loss 'triplet' has no mining={mining!r:.40}: it is 'semi_hard' or 'hard'."
        )
    labels = jnp.asarray(labels)
    is_same = labels[:, None] == labels
    is_positive = is_same & ~jnp.eye(len(labels), dtype=bool)
    distances = _distances(floating(embeddings))
    # For each anchor its negatives, nearest first, padded with infinity.
    negatives = jnp.sort(jnp.where(is_same, jnp.inf, distances), axis=1)
    n_pairs = jnp.where(is_same.all(1), 0, is_positive.sum(1))
    if mining == "hard":
        farthest = jnp.max(jnp.where(is_positive, distances, 0), axis=1)
        excess = farthest - negatives[:, 0]
        has_triplet = n_pairs > 0
        values = jnp.where(has_triplet, jnp.maximum(excess + margin, 0), 0)
        return values, has_triplet.astype(jnp.float32)
    farther = jax.vmap(lambda row, d: jnp.searchsorted(row, d, side="right"))(negatives, distances)
    last = jnp.maximum((~is_same).sum(1, keepdims=True) - 1, 0)
    chosen = jnp.take_along_axis(negatives, jnp.minimum(farther, last), axis=1)
    counts = is_positive & (n_pairs > 0)[:, None]
    excess = jnp.where(counts, distances, 0) - jnp.where(counts, chosen, 0) + margin
    total = jnp.sum(jnp.where(counts, jnp.maximum(excess, 0), 0), axis=1)
    return total / jnp.maximum(n_pairs, 1), n_pairs.astype(jnp.float32)


def _distances(x: jax.Array) -> jax.Array:
    """Returns the Euclidean distances of rows, with a finite gradient at 0."""
    products = jnp.matmul(x, x.T, precision="highest")
    lengths = jnp.diagonal(products)
    squares = jnp.maximum(lengths[:, None] + lengths - 2 * products, 0)
    # Both `where`s: the gradient of sqrt at 0 is inf, which the outer one alone would turn to NaN.
    is_apart = squares > 0
    return jnp.where(is_apart, jnp.sqrt(jnp.where(is_apart, squares, 1)), 0)
