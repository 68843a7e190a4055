"""Shared parts of the losses: options, casts, and checks of shapes."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.display import short_errors
from flaxfit.tree import ArrayLike, LossFn

EPSILON = 1e-7
"""The smallest probability and the smallest divisor, as in Keras."""


def public(loss: LossFn) -> LossFn:
    """Shortens a loss's errors, and makes a call with only options return a partial of it."""
    signature = inspect.signature(loss)
    parameters = signature.parameters.values()
    arrays = {p.name for p in parameters if p.default is p.empty}
    known = [p.name for p in parameters if p.name not in arrays]

    @functools.wraps(loss)
    def configured(*arguments: ArrayLike, **given: Any) -> Any:
        named = {name: given.pop(name) for name in arrays & given.keys()}
        options = _checked_options(loss.__name__, given, known)
        if not arguments and not named:
            return functools.partial(itself, **options)
        return loss(*arguments, **named, **options)

    # `is_by_row` ignores the mark of anything with `__wrapped__`, as `wraps` copies marks.
    itself = short_errors(configured)
    attributes = vars(itself)
    del attributes["__wrapped__"]
    attributes |= {"__signature__": signature, "is_public": True}
    return itself


def is_public(each: object) -> bool:
    """Returns whether this is a loss that `public` made."""
    return getattr(each, "is_public", False)


def _checked_options(name: str, options: dict[str, Any], known: list[str]) -> dict[str, Any]:
    """Returns the options of a loss, with Keras's `ignore_class` renamed to `ignore_label`."""
    if "ignore_class" in options and "ignore_label" in known:
        if "ignore_label" in options:
            raise TypeError(f"loss {name!r}: ignore_class is ignore_label: pass one of them.")
        options = dict(options)
        options["ignore_label"] = options.pop("ignore_class")
    unknown = [option for option in options if option not in known]
    if unknown:
        advice = ""
        if "reduction" in unknown:
            advice = " The mean that is trained is weighted by sample_weight, and needs no option."
        taken = ", ".join(known) or "none"
        raise TypeError(
            f"loss {name!r} has no option {', '.join(unknown)}: it takes {taken}.{advice}"
        )
    return options


def floating(array: ArrayLike) -> jax.Array:
    """Casts to float32 or wider: integers (uint8!) wrap around, 16 bits hold too few digits."""
    array = jnp.asarray(array)
    is_wide = jnp.issubdtype(array.dtype, jnp.inexact) and array.dtype.itemsize >= 4
    return array if is_wide else array.astype(jnp.float32)


def check_same_shape(
    name: str, outputs: ArrayLike, targets: ArrayLike, what: str = "targets"
) -> None:
    """Checks that targets have the shape of the outputs, as they might broadcast."""
    shape, received = np.shape(outputs), np.shape(targets)
    if shape == received:
        return
    advice = "Reshape one of them."
    if received == (*shape, 1):
        advice = f"Squeeze the {what} (y[..., 0])."
    elif shape == (*received, 1):
        advice = f"Add an axis to the {what} (y[..., None]), or squeeze the outputs."
    raise ValueError(
        f"loss {name!r} expects {what} and outputs of the same shape, got outputs {shape} and "
        f"{what} {received}. {advice}"
    )


def check_embeddings(name: str, embeddings: ArrayLike, labels: ArrayLike) -> None:
    """Checks that there is a label for each row of embeddings."""
    shape = np.shape(embeddings)
    if len(shape) != 2 or np.shape(labels) != shape[:1]:
        raise ValueError(
            f"loss {name!r} expects embeddings of shape (batch, features) and a label for each, "
            f"got outputs {shape} and labels {np.shape(labels)}."
        )
    if jnp.issubdtype(dtype := jnp.asarray(labels).dtype, jnp.floating):
        raise ValueError(
            f"loss {name!r} expects integer labels, got labels of {dtype}. Cast them: "
            "y.astype('int32')."
        )


def check_onehot(name: str, outputs: ArrayLike, labels: ArrayLike, integers: str) -> None:
    """Checks that labels and outputs have one value per class, for several classes."""
    shape = np.shape(outputs)
    if np.shape(labels) != shape or len(shape) < 2 or shape[-1] == 1:
        raise ValueError(
            f"loss {name!r} expects one-hot labels of the shape of the outputs, "
            f"(batch, ..., classes), got outputs {shape} and labels {np.shape(labels)}. "
            f"Use loss={integers!r} for integer labels, 'binary_crossentropy' for single scores."
        )


def check_share(name: str, option: str, value: float) -> None:
    """Checks that an option lies in [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"loss {name!r}: {option} must lie between 0 and 1, got {value!r}.")


def with_axis_last(name: str, axis: int, *arrays: ArrayLike) -> tuple[ArrayLike, ...]:
    """Moves the class axis of arrays to the end."""
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(f"loss {name!r}: axis must be an integer, got {axis!r}.")
    if axis == -1:
        return arrays
    n = np.ndim(arrays[0])
    if axis in (0, -n) or not -n <= axis < n:
        raise ValueError(
            f"loss {name!r}: axis={axis} must be one of the axes after the first, that of the "
            f"examples; the outputs have shape {np.shape(arrays[0])}."
        )
    return tuple(jnp.moveaxis(jnp.asarray(x), axis, -1) for x in arrays)


def log_of_shares(probabilities: jax.Array) -> jax.Array:
    """Returns logs of probabilities, normalized along the last axis as in Keras."""
    return jnp.log(clipped(probabilities / probabilities.sum(-1, keepdims=True)))


def but_ruled_out(logs: jax.Array, labels: jax.Array) -> jax.Array:
    """Replaces -inf (a masked class) by 0 where the label is 0, since 0 * -inf is NaN."""
    return jnp.where((labels == 0) & jnp.isneginf(logs), 0, logs)


def certain_bits(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Replaces infinite logits that are right by the largest finite number: inf - inf is NaN."""
    largest = jnp.finfo(logits.dtype).max
    return jnp.where(labels == (logits > 0), jnp.clip(logits, -largest, largest), logits)


def clipped(probabilities: jax.Array) -> jax.Array:
    """Clips probabilities so that `log(p)` and `log(1 - p)` are finite."""
    return jnp.clip(probabilities, EPSILON, 1 - EPSILON)


def smoothed_bits(labels: jax.Array, label_smoothing: float) -> jax.Array:
    """Moves labels in 0..1 toward 1/2."""
    return labels * (1 - label_smoothing) + label_smoothing / 2


def power(base: jax.Array, exponent: float) -> jax.Array:
    """Returns a power of nonnegative values, with a finite gradient at 0."""
    # The inner `where` matters: the gradient of the untaken branch would be inf, and 0 * inf NaN.
    is_positive = base > 0
    return jnp.where(is_positive, jnp.where(is_positive, base, 1) ** exponent, 0.0**exponent)
