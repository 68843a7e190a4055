"""What a model answers to the names of other libraries."""

import numpy as np
import optax
import pytest
from flax import linen as nn

import flaxfit as ff
from flaxfit.model._other_names import _ADVICE

MODEL = ff.Model(nn.Dense(1), optax.sgd(0.1), "mse")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layers", "its module is model.module"),
        ("trainable_variables", "the parameters are model.state.params"),
        ("stop_training", r"checkpoint.replace\(stop=True\)"),
        ("fit_generator", "take generators"),
        ("built", "makes the parameters"),
    ],
)
def test_a_name_of_keras_is_answered_with_what_to_use(name, words):
    with pytest.raises(AttributeError, match=f"^Model has no '{name}': .*{words}"):
        getattr(MODEL, name)
    with pytest.raises(AttributeError, match=f"^Model has no '{name}': .*{words}"):
        setattr(MODEL, name, True)


def test_no_name_is_one_that_the_model_has():
    assert not [name for name in _ADVICE if hasattr(ff.Model, name)]


def test_other_names_are_unknown_as_usual():
    with pytest.raises(AttributeError, match="^'Model' object has no attribute 'fitt'"):
        _ = MODEL.fitt
    with pytest.raises(TypeError, match=r"cannot be called: use model.predict\(x\)"):
        MODEL(np.ones((2, 3)))
