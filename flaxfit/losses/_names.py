"""The names of losses, and which function a user means."""

import difflib
from collections.abc import Callable
from typing import Any

import optax

from flaxfit.losses._functions import (
    binary_crossentropy,
    cosine_distance,
    crossentropy,
    hinge,
    huber,
    kl_divergence,
    log_cosh,
    mae,
    mse,
    onehot_crossentropy,
)
from flaxfit.tree._argument_order import check_order

Loss = Callable[..., Any]

_LOSSES: dict[str, Loss] = {
    loss.__name__: loss
    for loss in (
        crossentropy,
        onehot_crossentropy,
        binary_crossentropy,
        mse,
        mae,
        huber,
        log_cosh,
        hinge,
        kl_divergence,
        cosine_distance,
    )
}

_ALIASES: dict[str, Loss] = {
    "cross_entropy": crossentropy,
    "sparse_categorical_crossentropy": crossentropy,
    "categorical_crossentropy": onehot_crossentropy,
    "bce": binary_crossentropy,
    "squared_error": mse,
    "mean_squared_error": mse,
    "absolute_error": mae,
    "mean_absolute_error": mae,
    "huber_loss": huber,
    "logcosh": log_cosh,
    "kld": kl_divergence,
}

_CHECKED_INSTEAD: dict[Loss, Loss] = {
    optax.softmax_cross_entropy_with_integer_labels: crossentropy,
    optax.softmax_cross_entropy: onehot_crossentropy,
    optax.sigmoid_binary_cross_entropy: binary_crossentropy,
}


def resolve(loss: str | Loss) -> Loss:
    """Finds the loss function that a user means by a name or a function.

    A function comes back as it is, except for the Optax losses that broadcast in silence: these
    become the checked ones of `flaxfit.losses`, which compute the same.

    >>> resolve("mean_squared_error") is mse
    True

    Raises:
      ValueError: no loss has that name.
      TypeError: neither a name nor a function, or a function that takes the targets first.
    """
    if isinstance(loss, str):
        known = _LOSSES | _ALIASES
        if loss in known:
            return known[loss]
        nearest = difflib.get_close_matches(loss.lower(), known, cutoff=0.5) or _LOSSES
        raise ValueError(f"There is no loss {loss!r}. Did you mean {', '.join(nearest)}?")
    if not callable(loss):
        raise TypeError(
            "A loss must be a name or a function (*outputs, *targets) -> values, got "
            f"{type(loss).__name__}: {loss!r:.60}"
        )
    check_order("loss", loss)
    try:
        return _CHECKED_INSTEAD.get(loss, loss)
    except TypeError:  # A callable object need not be hashable.
        return loss
