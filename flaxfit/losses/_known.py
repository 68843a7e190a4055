"""Which names and functions are known to be losses, and so are better when they are lower."""

import functools
from typing import Any

import optax

from flaxfit.losses._names import _ALIASES, _LOSSES

# Spelled out: `optax.losses` also holds similarities and functions that make losses.
_OF_OPTAX = (
    "binary_dice_loss",
    "convex_kl_divergence",
    "cosine_distance",
    "ctc_loss",
    "dice_loss",
    "generalized_kl_divergence",
    "hinge_loss",
    "huber_loss",
    "kl_divergence",
    "kl_divergence_with_log_targets",
    "l2_loss",
    "log_cosh",
    "multiclass_generalized_dice_loss",
    "multiclass_hinge_loss",
    "multiclass_perceptron_loss",
    "multiclass_sparsemax_loss",
    "ntxent",
    "perceptron_loss",
    "poly_loss_cross_entropy",
    "ranking_softmax_loss",
    "safe_softmax_cross_entropy",
    "sigmoid_binary_cross_entropy",
    "sigmoid_focal_loss",
    "softmax_cross_entropy",
    "softmax_cross_entropy_with_integer_labels",
    "sparsemax_loss",
    "squared_error",
    "triplet_margin_loss",
)

_NAMES = {*_LOSSES, *_ALIASES, *_OF_OPTAX}
_FUNCTIONS = (
    *_LOSSES.values(),
    *(getattr(optax.losses, name) for name in _OF_OPTAX if hasattr(optax.losses, name)),
)


def is_loss(loss: Any) -> bool:
    """Whether a name or a function, partial ones included, is a loss of flaxfit or of Optax.

    >>> is_loss("hinge"), is_loss(functools.partial(optax.huber_loss, delta=2.0)), is_loss(max)
    (True, True, False)
    """
    if isinstance(loss, str):
        return loss in _NAMES
    while isinstance(loss, functools.partial):
        loss = loss.func
    return any(loss is known for known in _FUNCTIONS)
