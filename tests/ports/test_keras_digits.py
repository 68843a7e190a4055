"""A script in Keras that learns digits, and its port: they differ in the model and few lines."""

import numpy as np
import pytest
from flax import nnx
from keras_scripts import N_LINES, digits, n_changed_lines, seed_weights, with_weights_of

import flaxfit as ff


def in_keras(model):
    import keras

    x_train, x_test, y_train, y_test = digits()
    model.compile(
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    history = model.fit(
        x_train, y_train, 64, 5, verbose=2, validation_data=(x_test, y_test), shuffle=False
    )
    results = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
    predicted = model.predict(x_test, verbose=0).argmax(axis=1)
    return history.history, results, predicted


def in_flaxfit(model):
    import optax

    x_train, x_test, y_train, y_test = digits()
    model.compile(
        optimizer=optax.sgd(0.05, momentum=0.9),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    history = model.fit(
        x_train, y_train, 64, 5, verbose=2, validation_data=(x_test, y_test), shuffle=False
    )
    results = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
    predicted = model.predict(x_test, verbose=0).argmax(axis=1)
    return history.history, results, predicted


def keras_model(keras):
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(64, activation="relu", name="hidden"),
            layers.Dense(32, activation="relu", name="second"),
            layers.Dense(10, activation="softmax", name="scores"),
        ]
    )


class Network(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.second = nnx.Linear(64, 32, rngs=rngs)
        self.scores = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.hidden(x))
        return self.scores(nnx.relu(self.second(x)))


@pytest.mark.thorough  # The other scripts train, validate, evaluate and predict as it does.
def test_digits_are_learned_as_in_keras(keras):
    seed_weights()
    original = keras_model(keras)
    network = with_weights_of(original, Network(nnx.Rngs(0)))
    expected, of_keras, theirs = in_keras(original)
    found, ours, predicted = in_flaxfit(ff.Model(network))
    assert expected.keys() == found.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4)
    assert ours == pytest.approx(of_keras, rel=1e-4)
    assert (predicted == theirs).mean() > 0.99
    assert ours["accuracy"] > 0.9


def test_the_port_changes_few_lines():
    assert n_changed_lines(in_keras, in_flaxfit) <= N_LINES
