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
        ("clip_norm", r"model.compile\(clip_norm=...\) sets it"),
        ("loss_weights", r"model.compile\(loss_weights=...\)"),
        ("callbacks", r"pass it to fit, callbacks=..."),
        ("eval_rngs", r"pass Model\(..., eval_rngs=...\)"),
        ("lr", r"model.compile\(optimizer=optax.adam\(0.01\)\) sets it"),
    ],
)
def test_a_name_of_keras_or_of_an_option_is_answered_with_what_to_use(name, words):
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


def test_a_subclass_may_have_attributes_of_its_own():
    class Mine(ff.Model):
        precision = "of my sensors"

    model = Mine(nn.Dense(1), optax.sgd(0.1), "mse")
    model.precision, model.notes = "0.1 mm", ["ours"]
    assert (model.precision, model.notes) == ("0.1 mm", ["ours"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train_step", r"pass Model\(..., step=...\)"),
        ("test_step", "pass metrics for what evaluate is to measure"),
        ("training_step", r"objective=..., a loss that calls the model"),
        ("compute_loss", "pass a loss"),
        ("call", "write a Flax module"),
        ("on_epoch_end", r"pass callbacks=\[flaxfit.callbacks.Events\(on_epoch_end=...\)\]"),
    ],
)
def test_a_method_that_is_never_called_is_refused_where_it_is_defined(name, words):
    with pytest.raises(TypeError, match=f"^Mine defines .*, which a Model never calls: .*{words}"):
        type("Mine", (ff.Model,), {name: lambda self, data: None})
