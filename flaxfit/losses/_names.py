"""The names of losses, and the functions that they mean."""

import difflib
import functools
import re

import optax

from flaxfit.display import short_errors
from flaxfit.losses import (
    _circle,
    _contrastive,
    _crossentropy,
    _ctc,
    _focal,
    _hinge,
    _overlap,
    _regression,
    _triplet,
)
from flaxfit.losses._keras import ALIASES, refuse_keras
from flaxfit.losses._shared import is_public
from flaxfit.tree import LossFn as Loss
from flaxfit.tree import check_order

_MODULES = (_crossentropy, _regression, _hinge, _focal, _overlap)
_MODULES += (_ctc, _circle, _contrastive, _triplet)
_LOSSES: dict[str, Loss] = {
    name: each for module in _MODULES for name, each in vars(module).items() if is_public(each)
}
_ALIASES: dict[str, Loss] = {
    name: _LOSSES[own]
    for name, own in {
        **ALIASES,
        "cross_entropy": "crossentropy",
        "squared_error": "mse",
        "absolute_error": "mae",
        "huber_loss": "huber",
        "logcosh": "log_cosh",
        "binary_focal": "binary_focal_crossentropy",
        "categorical_focal": "categorical_focal_crossentropy",
        "ctc_loss": "ctc",
    }.items()
}
_CHECKED: dict[Loss, Loss] = {
    optax.softmax_cross_entropy_with_integer_labels: _crossentropy.crossentropy,
    optax.softmax_cross_entropy: _crossentropy.onehot_crossentropy,
    optax.sigmoid_binary_cross_entropy: _crossentropy.binary_crossentropy,
}
# `optax.losses` also holds a similarity, `smooth_labels`, and functions that make losses.
_IS_LOSS = re.compile(
    r"(?!make_).*(loss|entropy|divergence|distance|error|ntxent|log_cosh|_targets|_integer_labels)"
)
_OF_OPTAX = {name: loss for name, loss in vars(optax.losses).items() if _IS_LOSS.fullmatch(name)}


@short_errors
def resolve(loss: str | Loss) -> Loss:
    """Finds the loss function that a user means by a name or a function.

    It knows the names of flaxfit, Keras (functions and classes) and `optax.losses`. A function
    is returned unchanged, except for the Optax losses that broadcast silently: they are replaced by
    the checked ones of `flaxfit.losses`, which compute the same.

    >>> resolve("mean_squared_error") is resolve("MeanSquaredError") is resolve("mse")
    True

    Raises:
      ValueError: no loss has that name.
      TypeError: it is neither a name nor a function, is a class, or takes the targets first.
    """
    if isinstance(loss, str):
        known = _OF_OPTAX | _ALIASES | _LOSSES
        if loss not in known:
            nearest = difflib.get_close_matches(loss.lower(), known, cutoff=0.5) or _LOSSES
            raise ValueError(f"There is no loss {loss!r}. Did you mean {', '.join(nearest)}?")
        loss = known[loss]
    if not callable(loss):
        raise TypeError(
            "A loss must be a name or a function (*outputs, *targets) -> values, got "
            f"{type(loss).__name__}: {loss!r:.60}"
        )
    refuse_keras(loss, _LOSSES)
    if isinstance(loss, type):
        raise TypeError(
            "A loss must be a function (*outputs, *targets) -> values, got the class "
            f"{loss.__name__}: make one, {loss.__name__}(...)."
        )
    check_order("loss", loss)
    try:
        return _CHECKED.get(loss, loss)
    except TypeError:  # A callable object need not be hashable.
        return loss


def is_loss(loss: object) -> bool:
    """Returns whether a name or a (partial) function is a loss of flaxfit or Optax.

    >>> is_loss("hinge"), is_loss(functools.partial(optax.huber_loss, delta=2.0)), is_loss(max)
    (True, True, False)
    """
    if isinstance(loss, str):
        return loss in {*_LOSSES, *_ALIASES, *_OF_OPTAX}
    while isinstance(loss, functools.partial):
        loss = loss.func
    return any(loss is known for known in (*_LOSSES.values(), *_OF_OPTAX.values()))
