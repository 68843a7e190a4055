"""The names that Keras has for losses, and its own objects, which are refused."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

from flaxfit.tree import LossFn, PyTree

_OWN = {
    "SparseCategoricalCrossentropy": "crossentropy",
    "CategoricalCrossentropy": "onehot_crossentropy",
    "CategoricalGeneralizedCrossEntropy": "generalized_crossentropy",
    "MeanSquaredError": "mse",
    "MeanAbsoluteError": "mae",
    "MeanAbsolutePercentageError": "mape",
    "MeanSquaredLogarithmicError": "msle",
}
_SAME = ("BinaryCrossentropy", "BinaryFocalCrossentropy", "CategoricalFocalCrossentropy", "Huber")
_SAME += ("KLDivergence", "Poisson", "CosineSimilarity", "LogCosh", "Hinge", "SquaredHinge")
_SAME += ("CategoricalHinge", "Dice", "Tversky", "CTC", "Circle")


def _as_function(name: str) -> str:
    """The name of the function of a class of Keras."""
    return re.sub("(?<=[a-z])(?=[A-Z])|(?<=KL)(?=D)", "_", name).lower()


OF_CLASSES = {**_OWN, **{name: _as_function(name) for name in _SAME}}
"""Our names of the classes of Keras."""
OF_FUNCTIONS = {_as_function(name): own for name, own in OF_CLASSES.items()}
"""Our names of its functions."""
SHORT = {"BCE": "binary_crossentropy", "KLD": "kl_divergence", "MSE": "mse", "MAE": "mae"}
SHORT |= {"MAPE": "mape", "MSLE": "msle"}
ALIASES = {**OF_CLASSES, **OF_FUNCTIONS, **SHORT, **{n.lower(): own for n, own in SHORT.items()}}
"""Our names of all that Keras knows by a string."""


def refuse_keras(loss: PyTree, known: Mapping[str, LossFn]) -> None:
    """Refuses a loss of Keras, which takes the targets first, with the counterpart among `known`.

    Raises:
      TypeError: it is an object, a class or a function of Keras that has one.
    """
    kind = loss if inspect.isclass(loss) or inspect.isfunction(loss) else type(loss)
    if str(kind.__module__).partition(".")[0] not in ("keras", "tf_keras"):
        return
    name = kind.__name__
    own = OF_FUNCTIONS.get(name) if inspect.isfunction(loss) else OF_CLASSES.get(name)
    if own is None:
        return
    options = _options(loss, known[own])
    call = f"flaxfit.losses.{own}" + (f"({options})" if options else "")
    raise TypeError(
        f"{name} of Keras takes the targets first, and flaxfit calls loss(outputs, targets): use "
        f"{call} or a name, loss={own!r}. Losses of classes take logits, unless from_logits=False."
    )


def _options(loss: PyTree, own: LossFn) -> str:
    """The options of a loss object of Keras that its counterpart takes and that change it."""
    defaults = {p.name: p.default for p in inspect.signature(own).parameters.values()}
    given: Mapping[str, Any] = getattr(loss, "_fn_kwargs", {})
    renamed = {{"ignore_class": "ignore_label"}.get(name, name): x for name, x in given.items()}
    return ", ".join(
        f"{name}={value!r}"
        for name, value in renamed.items()
        if name in defaults and value != defaults[name]
    )
