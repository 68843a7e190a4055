"""Keras's names of losses; Keras's own loss objects are rejected."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

from flaxfit.tree import Function, LossFn, PyTree, parameters

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
    """Returns the name of the function that belongs to a Keras class."""
    return re.sub("(?<=[a-z])(?=[A-Z])|(?<=KL)(?=D)", "_", name).lower()


OF_CLASSES = {**_OWN, **{name: _as_function(name) for name in _SAME}}
"""Our names by Keras class."""
OF_FUNCTIONS = {_as_function(name): own for name, own in OF_CLASSES.items()}
"""Our names by Keras function."""
SHORT = {"BCE": "binary_crossentropy", "KLD": "kl_divergence", "MSE": "mse", "MAE": "mae"}
SHORT |= {"MAPE": "mape", "MSLE": "msle"}
ALIASES = {**OF_CLASSES, **OF_FUNCTIONS, **SHORT, **{n.lower(): own for n, own in SHORT.items()}}
"""Our names by every string that Keras accepts."""


def refuse_keras(loss: PyTree, known: Mapping[str, LossFn]) -> None:
    """Rejects a Keras loss, which takes the targets first, and names the one among `known`."""
    kind = loss if inspect.isclass(loss) or inspect.isfunction(loss) else type(loss)
    if not is_of_keras(kind):
        return
    name = kind.__name__
    own = OF_FUNCTIONS.get(name) if inspect.isfunction(loss) else OF_CLASSES.get(name)
    if own is None:
        return
    given = getattr(loss, "_fn_kwargs", {})
    call = call_of(f"flaxfit.losses.{own}", given, {"ignore_class": "ignore_label"}, known[own])
    raise TypeError(
        f"{name} of Keras takes the targets first, and flaxfit calls loss(outputs, targets): use "
        f"{call} or a name, loss={own!r}. Losses of classes take logits, unless from_logits=False."
    )


def is_of_keras(kind: Any) -> bool:
    """Returns whether a class or a function is one of Keras."""
    return str(kind.__module__).partition(".")[0] in ("keras", "tf_keras")


def call_of(
    path: str, given: Mapping[str, Any], renamed: Mapping[str, str], own: Function | None
) -> str:
    """Returns the call of a counterpart, with the given options that it has, except defaults."""
    known = parameters(own)
    named = {renamed.get(name, name): value for name, value in given.items()}
    options = ", ".join(
        f"{name}={value!r}"
        for name, value in named.items()
        if name in known and value is not None and value != known[name].default
    )
    return path + (f"({options})" if options else "")
