"""Hinge losses: penalties of margins that are too small."""

import jax
import jax.numpy as jnp
import optax

from flaxfit.losses._shared import check_onehot, check_same_shape, floating, public
from flaxfit.tree import ArrayLike, by_row


@public
@by_row
def hinge(scores: ArrayLike, labels: ArrayLike) -> jax.Array:
    """Computes the elementwise hinge loss, `max(0, 1 - label * score)`.

    Args:
      scores: outputs of any shape.
      labels: -1 or 1, of the same shape.

    Raises:
      ValueError: the shapes differ.

    >>> import numpy as np
    >>> hinge(np.array([0.5, 5.0]), np.array([-1, 1]))
    Array([1.5, 0. ], dtype=float32)
    """
    check_same_shape("hinge", scores, labels, "labels")
    return optax.hinge_loss(floating(scores), floating(labels))


@public
@by_row
def squared_hinge(scores: ArrayLike, labels: ArrayLike) -> jax.Array:
    """Computes the elementwise squared hinge loss, `max(0, 1 - label * score)**2`.

    Args:
      scores: outputs of any shape.
      labels: -1 or 1, of the same shape.

    Raises:
      ValueError: the shapes differ.

    >>> import numpy as np
    >>> squared_hinge(np.array([0.5, 5.0]), np.array([-1, 1]))
    Array([2.25, 0.  ], dtype=float32)
    """
    check_same_shape("squared_hinge", scores, labels, "labels")
    return jnp.square(optax.hinge_loss(floating(scores), floating(labels)))


@public
@by_row
def categorical_hinge(scores: ArrayLike, labels: ArrayLike) -> jax.Array:
    """Computes the categorical hinge loss, `max(0, 1 + best other score - true class's score)`.

    As in Keras, the best other score is at least 0.

    Args:
      scores: `(batch, ..., classes)`.
      labels: one-hot, of the same shape.

    Raises:
      ValueError: the labels are not of the shape of the scores.

    >>> import numpy as np
    >>> categorical_hinge(np.array([[0.5, 0.25], [3.0, 1.0]]), np.eye(2)[[0, 0]])
    Array([0.75, 0.  ], dtype=float32)
    """
    check_onehot("categorical_hinge", scores, labels, "multiclass_hinge_loss")
    scores, labels = floating(scores), floating(labels)
    own, other = (labels * scores).sum(-1), ((1 - labels) * scores).max(-1)
    return jnp.maximum(other - own + 1, 0)
