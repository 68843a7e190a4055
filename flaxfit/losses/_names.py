"""The names of losses, and the functions that they mean."""

import difflib
import functools
import re

import optax

from flaxfit.losses import _contrastive as contrastive
from flaxfit.losses import _functions as ours
from flaxfit.tree._checks import check_order
from flaxfit.tree._types import LossFn

Loss = LossFn

_LOSSES: dict[str, Loss] = {
    loss.__name__: loss
    for loss in (
        ours.crossentropy,
        ours.onehot_crossentropy,
        ours.binary_crossentropy,
        ours.mse,
        ours.mae,
        ours.huber,
        ours.log_cosh,
        ours.hinge,
        ours.kl_divergence,
        ours.cosine_distance,
        contrastive.info_nce,
    )
}
_ALIASES: dict[str, Loss] = {
    "cross_entropy": ours.crossentropy,
    "sparse_categorical_crossentropy": ours.crossentropy,
    "categorical_crossentropy": ours.onehot_crossentropy,
    "bce": ours.binary_crossentropy,
    "squared_error": ours.mse,
    "mean_squared_error": ours.mse,
    "absolute_error": ours.mae,
    "mean_absolute_error": ours.mae,
    "huber_loss": ours.huber,
    "logcosh": ours.log_cosh,
    "kld": ours.kl_divergence,
}
_CHECKED: dict[Loss, Loss] = {
    optax.softmax_cross_entropy_with_integer_labels: ours.crossentropy,
    optax.softmax_cross_entropy: ours.onehot_crossentropy,
    optax.sigmoid_binary_cross_entropy: ours.binary_crossentropy,
}
# `optax.losses` also holds a similarity, `smooth_labels`, and functions that make losses.
_IS_LOSS = re.compile(
    r"(?!make_).*(loss|entropy|divergence|distance|error|ntxent|log_cosh|_targets|_integer_labels)"
)
_OF_OPTAX = {name: loss for name, loss in vars(optax.losses).items() if _IS_LOSS.fullmatch(name)}


def resolve(loss: str | Loss) -> Loss:
    """Finds the loss function that a user means by a name or a function.

    A function is returned unchanged, except for the Optax losses that broadcast silently: they are
    replaced by the checked ones of `flaxfit.losses`, which compute the same.

    >>> resolve("mean_squared_error") is ours.mse
    True

    Raises:
      ValueError: no loss has that name.
      TypeError: it is neither a name nor a function, or a function that takes the targets first.
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
        return _CHECKED.get(loss, loss)
    except TypeError:  # A callable object need not be hashable.
        return loss


def is_loss(loss: object) -> bool:
    """Whether a name or a function, possibly partial, is a loss of flaxfit or Optax.

    >>> is_loss("hinge"), is_loss(functools.partial(optax.huber_loss, delta=2.0)), is_loss(max)
    (True, True, False)
    """
    if isinstance(loss, str):
        return loss in {*_LOSSES, *_ALIASES, *_OF_OPTAX}
    while isinstance(loss, functools.partial):
        loss = loss.func
    return any(loss is known for known in (*_LOSSES.values(), *_OF_OPTAX.values()))
