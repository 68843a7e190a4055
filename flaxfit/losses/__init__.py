"""Losses by name: Optax's per-example losses behind checks of shapes, dtypes and label values.

Every loss takes `(outputs, targets)` and returns values of shape `(batch, ...)`; flaxfit takes
their weighted mean. Classification losses take logits. Optax broadcasts in silence where shapes
differ; the losses here raise an error with both shapes.

>>> import numpy as np
>>> crossentropy(np.array([[2.0, 0.0], [2.0, 0.0]]), np.array([0, 1])) > 1
Array([False,  True], dtype=bool)
"""

from flaxfit.losses._checks import check_loss_shape as check_loss_shape
from flaxfit.losses._checks import check_values as check_values
from flaxfit.losses._circle import circle as circle
from flaxfit.losses._contrastive import info_nce as info_nce
from flaxfit.losses._contrastive import supervised_contrastive as supervised_contrastive
from flaxfit.losses._crossentropy import binary_crossentropy as binary_crossentropy
from flaxfit.losses._crossentropy import crossentropy as crossentropy
from flaxfit.losses._crossentropy import kl_divergence as kl_divergence
from flaxfit.losses._crossentropy import onehot_crossentropy as onehot_crossentropy
from flaxfit.losses._ctc import ctc as ctc
from flaxfit.losses._focal import binary_focal_crossentropy as binary_focal_crossentropy
from flaxfit.losses._focal import categorical_focal_crossentropy as categorical_focal_crossentropy
from flaxfit.losses._focal import generalized_crossentropy as generalized_crossentropy
from flaxfit.losses._hinge import categorical_hinge as categorical_hinge
from flaxfit.losses._hinge import hinge as hinge
from flaxfit.losses._hinge import squared_hinge as squared_hinge
from flaxfit.losses._names import Loss as Loss
from flaxfit.losses._names import resolve as resolve
from flaxfit.losses._overlap import dice as dice
from flaxfit.losses._overlap import tversky as tversky
from flaxfit.losses._regression import cosine_distance as cosine_distance
from flaxfit.losses._regression import cosine_similarity as cosine_similarity
from flaxfit.losses._regression import huber as huber
from flaxfit.losses._regression import log_cosh as log_cosh
from flaxfit.losses._regression import mae as mae
from flaxfit.losses._regression import mape as mape
from flaxfit.losses._regression import mse as mse
from flaxfit.losses._regression import msle as msle
from flaxfit.losses._regression import poisson as poisson
from flaxfit.losses._regression import smape as smape
from flaxfit.losses._triplet import triplet as triplet

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
