"""The names of Keras, and its objects, which are refused with their counterparts."""

import pytest

from flaxfit import losses
from flaxfit.losses._keras import OF_CLASSES, OF_FUNCTIONS, SHORT


def test_every_class_and_function_has_a_loss():
    for name, own in {**OF_CLASSES, **OF_FUNCTIONS, **SHORT}.items():
        assert losses.resolve(name) is getattr(losses, own), name
    assert OF_FUNCTIONS["kl_divergence"] == "kl_divergence" and OF_FUNCTIONS["ctc"] == "ctc"


@pytest.mark.slow
def test_every_loss_of_keras_is_named(keras):
    classes = {name for name, each in vars(keras.losses).items() if isinstance(each, type)}
    assert classes - {"Loss"} == OF_CLASSES.keys()
    functions = {name for name, each in vars(keras.losses).items() if type(each) is type(lambda: 0)}
    assert functions - {"deserialize", "get", "serialize"} <= OF_FUNCTIONS.keys()


@pytest.mark.slow
def test_objects_and_functions_of_keras_are_refused_with_our_call(keras):
    of = keras.losses
    for loss, call in [
        (of.SparseCategoricalCrossentropy(ignore_class=-1), "crossentropy(from_logits=False, ign"),
        (of.CategoricalCrossentropy(from_logits=True), "onehot_crossentropy or"),
        (of.Huber(delta=2.0), "huber(delta=2.0)"),
        (of.Dice, "dice or"),
        (of.kl_divergence, "kl_divergence or"),
    ]:
        with pytest.raises(TypeError) as error:
            losses.resolve(loss)
        assert f"use flaxfit.losses.{call}" in str(error.value)


@pytest.mark.slow
def test_another_loss_object_of_keras_is_refused_too(keras):
    class Own(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return y_pred

    with pytest.raises(TypeError, match="calls loss.outputs, targets."):
        losses.resolve(Own())
