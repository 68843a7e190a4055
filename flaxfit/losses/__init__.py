"""Losses by name: Optax's per-example losses behind checks of shapes, dtypes and label values.

Every loss takes `(outputs, targets)` and returns values of shape `(batch, ...)`; flaxfit takes
their weighted mean. Classification losses take logits. Optax broadcasts in silence where shapes
differ; the losses here refuse, with the shapes that they got.

>>> import numpy as np
>>> crossentropy(np.array([[2.0, 0.0], [2.0, 0.0]]), np.array([0, 1])) > 1
Array([False,  True], dtype=bool)
"""

from flaxfit.losses._checks import check_loss_shape as check_loss_shape
from flaxfit.losses._checks import check_values as check_values
from flaxfit.losses._contrastive import info_nce as info_nce
from flaxfit.losses._functions import binary_crossentropy as binary_crossentropy
from flaxfit.losses._functions import cosine_distance as cosine_distance
from flaxfit.losses._functions import crossentropy as crossentropy
from flaxfit.losses._functions import hinge as hinge
from flaxfit.losses._functions import huber as huber
from flaxfit.losses._functions import kl_divergence as kl_divergence
from flaxfit.losses._functions import log_cosh as log_cosh
from flaxfit.losses._functions import mae as mae
from flaxfit.losses._functions import mse as mse
from flaxfit.losses._functions import onehot_crossentropy as onehot_crossentropy
from flaxfit.losses._names import Loss as Loss
from flaxfit.losses._names import resolve as resolve
