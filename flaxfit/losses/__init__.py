"""Losses by name: Optax's per-example losses behind checks of shapes, dtypes and label values.

Every loss takes `(outputs, targets)` and returns values of shape `(batch, ...)`; flaxfit takes
their weighted mean. Classification losses take logits. If shapes differ, Optax broadcasts silently;
these losses raise an error with both shapes.

>>> import numpy as np
>>> crossentropy(np.array([[2.0, 0.0], [2.0, 0.0]]), np.array([0, 1])) > 1
Array([False,  True], dtype=bool)
"""

from flaxfit.losses._checks import check_loss_shape, check_values
from flaxfit.losses._circle import circle
from flaxfit.losses._contrastive import info_nce, supervised_contrastive
from flaxfit.losses._crossentropy import (
    binary_crossentropy,
    crossentropy,
    kl_divergence,
    onehot_crossentropy,
)
from flaxfit.losses._ctc import ctc
from flaxfit.losses._focal import (
    binary_focal_crossentropy,
    categorical_focal_crossentropy,
    generalized_crossentropy,
)
from flaxfit.losses._hinge import categorical_hinge, hinge, squared_hinge
from flaxfit.losses._names import Loss as Loss
from flaxfit.losses._names import resolve
from flaxfit.losses._overlap import dice, tversky
from flaxfit.losses._regression import (
    cosine_distance,
    cosine_similarity,
    huber,
    log_cosh,
    mae,
    mape,
    mse,
    msle,
    poisson,
    smape,
)
from flaxfit.losses._triplet import triplet

__all__ = [
    "binary_crossentropy",
    "binary_focal_crossentropy",
    "categorical_focal_crossentropy",
    "categorical_hinge",
    "check_loss_shape",
    "check_values",
    "circle",
    "cosine_distance",
    "cosine_similarity",
    "crossentropy",
    "ctc",
    "dice",
    "generalized_crossentropy",
    "hinge",
    "huber",
    "info_nce",
    "kl_divergence",
    "log_cosh",
    "mae",
    "mape",
    "mse",
    "msle",
    "onehot_crossentropy",
    "poisson",
    "resolve",
    "smape",
    "squared_hinge",
    "supervised_contrastive",
    "triplet",
    "tversky",
]
