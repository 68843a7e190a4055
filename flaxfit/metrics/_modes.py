"""Whether lower or higher values of a metric are better, by its function or its name."""

import re

import optax

from flaxfit.losses._names import is_loss
from flaxfit.tree._types import PyTree

_HIGHER = {
    "acc",
    "accuracy",
    "auc",
    "binary_accuracy",
    "categorical_accuracy",
    "cosine_similarity",
    "f1",
    "f1_score",
    "precision",
    "r2",
    "r2_score",
    "recall",
    "roc_auc",
    "sparse_categorical_accuracy",
    "sparse_top_k_categorical_accuracy",
    "top_k_categorical_accuracy",
}
_LOWER = {"perplexity", "rmse", "root_mean_squared_error"}


def mode_of(values: PyTree, name: str | None) -> str | None:
    """Returns "min" or "max" for a metric whose better values are known, else None.

    A metric that is the mean of a loss of flaxfit or Optax is minimised, whatever it is called.

    >>> mode_of(optax.huber_loss, "size"), mode_of(None, "top_3"), mode_of(None, "length")
    ('min', 'max', None)
    """
    if is_loss(values):
        return "min"
    if values is optax.cosine_similarity:
        return "max"
    name = (name or "").lower()
    if name in _HIGHER or re.fullmatch(r"top_\d+", name):
        return "max"
    return "min" if name in _LOWER or is_loss(name) else None
