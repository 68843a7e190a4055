"""Losses of segmentation masks by example: one minus the overlap with the target."""

from collections.abc import Sequence

import jax
import numpy as np

from flaxfit.losses._shared import EPSILON, check_same_shape, floating, public
from flaxfit.tree import ArrayLike, by_row


@public
@by_row
def dice(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    axis: int | Sequence[int] | None = None,
    from_logits: bool = True,
) -> jax.Array:
    """Computes `1 - 2 sum(p y) / (sum(p) + sum(y))` per example, p the sigmoid of the logits.

    F. Milletari, N. Navab, S.-A. Ahmadi, "V-Net", 2016, with the sums of Keras.

    Args:
      logits: `(batch, ...)`.
      labels: in 0..1, of the same shape.
      axis: the axes to sum over; None: all but the batch axis. The loss averages over the others.
      from_logits: False for outputs that are probabilities, such as a softmax's.

    Raises:
      ValueError: the shapes differ, or `axis` is not among the axes after the first.

    >>> dice(np.array([[9.0, 9.0, -9.0]]), np.array([[1, 0, 0]])).item() < 0.34
    True
    """
    shares, labels, axes = _prepared("dice", logits, labels, axis, from_logits)
    total = labels.sum(axes) + shares.sum(axes) + EPSILON
    return 1 - 2 * (shares * labels).sum(axes) / total


@public
@by_row
def tversky(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    alpha: float = 0.5,
    beta: float = 0.5,
    axis: int | Sequence[int] | None = None,
    from_logits: bool = True,
) -> jax.Array:
    """Computes `1 - s / (s + alpha sum((1 - p) y) + beta sum(p (1 - y)))`, `s = sum(p y)`.

    S. Salehi, D. Erdogmus, A. Gholipour, "Tversky loss function for image segmentation using 3D
    fully convolutional deep networks", 2017.

    Args:
      logits: `(batch, ...)`.
      labels: in 0..1, of the same shape.
      alpha: the weight of false negatives.
      beta: the weight of false positives.
      axis, from_logits: as in `dice`, which it is with the defaults.

    Raises:
      ValueError: the shapes differ, or `axis` is not among the axes after the first.

    >>> tversky(np.array([[9.0, 9.0, -9.0]]), np.array([[1, 0, 0]])).item() < 0.34
    True
    """
    shares, labels, axes = _prepared("tversky", logits, labels, axis, from_logits)
    both = (shares * labels).sum(axes)
    missed, wrong = ((1 - shares) * labels).sum(axes), (shares * (1 - labels)).sum(axes)
    return 1 - both / (both + alpha * missed + beta * wrong + EPSILON)


def summed_axes(name: str, axis: int | Sequence[int] | None, n: int) -> tuple[int, ...]:
    """Returns the axes to sum over, of an array of `n` axes."""
    if axis is None:
        return tuple(range(1, n))
    axes = tuple(each + n if each < 0 else each for each in np.atleast_1d(axis).tolist())
    if not all(0 < each < n for each in axes):
        raise ValueError(
            f"loss {name!r} has a value for each example: axis={axis!r} must name some of the "
            f"{n - 1} axes after the first."
        )
    return axes


def _prepared(
    name: str,
    logits: ArrayLike,
    labels: ArrayLike,
    axis: int | Sequence[int] | None,
    from_logits: bool,
) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    check_same_shape(name, logits, labels, "labels")
    axes = summed_axes(name, axis, np.ndim(logits))
    shares = floating(logits)
    return jax.nn.sigmoid(shares) if from_logits else shares, floating(labels), axes
