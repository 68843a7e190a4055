"""Losses for regression and for vectors."""

import jax
import jax.numpy as jnp
import optax

from flaxfit.losses._shared import EPSILON, check_same_shape, floating, public
from flaxfit.tree import ArrayLike, by_row


@public
@by_row
def mse(outputs: ArrayLike, targets: ArrayLike) -> jax.Array:
    """Computes the elementwise squared error, `(outputs - targets)**2`.

    Args:
      outputs: predictions of any shape.
      targets: values of the same shape.

    Raises:
      ValueError: the shapes differ.

    >>> import numpy as np
    >>> mse(np.array([1.0, 5.0]), np.array([1.0, 3.0]))
    Array([0., 4.], dtype=float32)
    """
    check_same_shape("mse", outputs, targets)
    return jnp.square(floating(outputs) - floating(targets))


@public
@by_row
def mae(outputs: ArrayLike, targets: ArrayLike) -> jax.Array:
    """Computes the elementwise absolute error, `|outputs - targets|`.

    Args:
      outputs: predictions of any shape.
      targets: values of the same shape.

    Raises:
      ValueError: the shapes differ.

    >>> import numpy as np
    >>> mae(np.array([1.0, 5.0]), np.array([1.0, 3.0]))
    Array([0., 2.], dtype=float32)
    """
    check_same_shape("mae", outputs, targets)
    return _size(floating(outputs) - floating(targets))


@public
@by_row
def mape(outputs: ArrayLike, targets: ArrayLike) -> jax.Array:
    """Computes the elementwise absolute percentage error, `100 |o - t| / max(|t|, 1e-7)`.

    Args:
      outputs: predictions of any shape.
      targets: values of the same shape.

    Raises:
      ValueError: the shapes differ.

    >>> import numpy as np
    >>> mape(np.array([1.0, 5.0]), np.array([1.0, 4.0]))
    Array([ 0., 25.], dtype=float32)
    """
    check_same_shape("mape", outputs, targets)
    outputs, targets = floating(outputs), floating(targets)
    return 100 * _size((outputs - targets) / jnp.maximum(jnp.abs(targets), EPSILON))


@public
@by_row
def smape(outputs: ArrayLike, targets: ArrayLike) -> jax.Array:
    """Computes the elementwise symmetric MAPE, `200 |o - t| / (|o| + |t|)`, from 0 to 200.

    It is 0 if both are 0.

    Args:
      outputs: predictions of any shape.
      targets: values of the same shape.

    Raises:
      ValueError: the shapes differ.

    >>> import numpy as np
    >>> smape(np.array([1.0, 5.0, 0.0]), np.array([1.0, 3.0, 0.0]))
    Array([ 0., 50.,  0.], dtype=float32)
    """
    check_same_shape("smape", outputs, targets)
    outputs, targets = floating(outputs), floating(targets)
    return 200 * _size(outputs - targets) / jnp.maximum(_size(outputs) + _size(targets), EPSILON)


@public
@by_row
def msle(outputs: ArrayLike, targets: ArrayLike) -> jax.Array:
    """Computes the elementwise squared logarithmic error, `(log(1 + o) - log(1 + t))**2`.

    As in Keras, values below 1e-7, negative ones included, count as 1e-7.

    Args:
      outputs: predictions of any shape.
      targets: values of the same shape.

    Raises:
      ValueError: the shapes differ.

    >>> import numpy as np
    >>> values = msle(np.array([0.0, 5.0]), np.array([0.0, 2.0]))
    >>> np.asarray(values, float).round(2)
    array([0.  , 0.48])
    """
    check_same_shape("msle", outputs, targets)
    logs = (jnp.log1p(jnp.maximum(floating(x), EPSILON)) for x in (outputs, targets))
    return jnp.square(next(logs) - next(logs))


@public
@by_row
def poisson(rates: ArrayLike, counts: ArrayLike) -> jax.Array:
    """Computes the elementwise Poisson negative log-likelihood, up to a constant.

    It is `rate - count * log(rate + 1e-7)`.

    Args:
      rates: outputs of any shape. They are positive, for example from `jax.nn.softplus`, and are
        not logarithms.
      counts: targets of the same shape.

    Raises:
      ValueError: the shapes differ.

    >>> import numpy as np
    >>> poisson(np.array([1.0, 2.0]), np.array([3.0, 0.0])).round(3)
    Array([1., 2.], dtype=float32)
    """
    check_same_shape("poisson", rates, counts)
    rates = floating(rates)
    return rates - floating(counts) * jnp.log(rates + EPSILON)


@public
@by_row
def huber(outputs: ArrayLike, targets: ArrayLike, *, delta: float = 1.0) -> jax.Array:
    """Computes the elementwise Huber loss, quadratic up to an error of `delta` and linear beyond.

    With `e = |outputs - targets|` it is `e**2 / 2` if `e <= delta`, else `delta (e - delta / 2)`.
    P. Huber, "Robust Estimation of a Location Parameter", 1964.

    Args:
      outputs: predictions of any shape.
      targets: values of the same shape.
      delta: the error at which the loss becomes linear, in the unit of the targets.

    Raises:
      ValueError: the shapes differ, or `delta` is not positive.

    >>> import numpy as np
    >>> huber(np.array([1.0, 5.0]), np.array([1.0, 3.0]))
    Array([0. , 1.5], dtype=float32)
    """
    check_same_shape("huber", outputs, targets)
    if not delta > 0:
        raise ValueError(f"loss 'huber': delta must be more than 0, got {delta!r}.")
    return optax.huber_loss(floating(outputs), floating(targets), delta=delta)


@public
@by_row
def log_cosh(outputs: ArrayLike, targets: ArrayLike) -> jax.Array:
    """Computes the elementwise log-cosh loss, `log(cosh(outputs - targets))`.

    Args:
      outputs: predictions of any shape.
      targets: values of the same shape.

    Raises:
      ValueError: the shapes differ.

    >>> import numpy as np
    >>> log_cosh(np.array([1.0, 5.0]), np.array([1.0, 3.0])).round(3)
    Array([0.   , 1.325], dtype=float32)
    """
    check_same_shape("log_cosh", outputs, targets)
    return optax.log_cosh(floating(outputs), floating(targets))


@public
def cosine_distance(outputs: ArrayLike, targets: ArrayLike, *, axis: int = -1) -> jax.Array:
    """Computes the cosine distance of vectors along an axis, `1 - o . t / (|o| |t|)`.

    Args:
      outputs: vectors, `(batch, ..., features)`.
      targets: vectors of the same shape.
      axis: the axis of the features, which the values do not have.

    Raises:
      ValueError: the shapes differ.

    >>> import numpy as np
    >>> cosine_distance(np.array([[0.0, 1.0]]), np.array([[2.0, 0.0]]))
    Array([1.], dtype=float32)
    """
    check_same_shape("cosine_distance", outputs, targets)
    return optax.cosine_distance(floating(outputs), floating(targets), epsilon=1e-8, axis=axis)


@public
def cosine_similarity(outputs: ArrayLike, targets: ArrayLike, *, axis: int = -1) -> jax.Array:
    """Computes the negative cosine similarity of vectors along an axis: -1 where they agree.

    It is `cosine_distance - 1`, as in Keras, and has the same gradient.

    Args:
      outputs: vectors, `(batch, ..., features)`.
      targets: vectors of the same shape.
      axis: the axis of the features, which the values do not have.

    Raises:
      ValueError: the shapes differ.

    >>> import numpy as np
    >>> cosine_similarity(np.array([[0.0, 1.0]]), np.array([[0.0, 2.0]]))
    Array([-1.], dtype=float32)
    """
    check_same_shape("cosine_similarity", outputs, targets)
    return -optax.cosine_similarity(floating(outputs), floating(targets), epsilon=1e-8, axis=axis)


def _size(numbers: jax.Array) -> jax.Array:
    """Returns `|x|` with a gradient of 0 at 0, where JAX's `abs` has 1."""
    return jnp.where(numbers == 0, 0, jnp.abs(numbers))
