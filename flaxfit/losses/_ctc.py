"""CTC: the loss of label sequences that are not aligned with the outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxfit.losses._shared import floating, public
from flaxfit.tree import ArrayLike, by_row


@public
@by_row
def ctc(logits: ArrayLike, labels: ArrayLike) -> jax.Array:
    """Computes the CTC loss per example: the negative log-likelihood of labels over all alignments.

    A. Graves et al., "Connectionist Temporal Classification", 2006, as `optax.ctc_loss` with the
    conventions of Keras: class 0 is the blank, and zeros after an example's labels are padding. All
    output steps count; to mask some, call `optax.ctc_loss` with paddings.

    Args:
      logits: `(batch, steps, classes)`.
      labels: integers of shape `(batch, length)`.

    Raises:
      ValueError: the shapes do not match, or the labels are not integers.

    >>> np.asarray(ctc(np.zeros((1, 2, 2)), np.array([[1, 0]])), float).round(3)
    array([0.288])
    """
    shape, received = np.shape(logits), np.shape(labels)
    dtype = labels.dtype if hasattr(labels, "dtype") else np.asarray(labels).dtype
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if len(shape) != 3 or len(received) != 2 or shape[0] != received[0] or not is_integer:
        raise ValueError(
            "loss 'ctc' expects outputs of shape (batch, steps, classes) and integer labels of "
            f"shape (batch, length), got outputs {shape} and labels {received} {dtype}."
        )
    logits, labels = floating(logits), jnp.asarray(labels)
    lengths = (labels != 0).sum(-1, keepdims=True)
    is_padding = (jnp.arange(received[1]) >= lengths).astype(logits.dtype)
    return optax.ctc_loss(logits, jnp.zeros(shape[:2], logits.dtype), labels, is_padding)
