"""A script in Keras of a model with two inputs and two outputs, and its port."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from keras_scripts import N_LINES, n_changed_lines, seed_weights, with_weights_of

import flaxfit as ff


def halves_and_ink():
    """The two halves of images of digits, and what is in them."""
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    images = images.astype("float32") / 16
    x = {"upper": images[:, :32], "lower": images[:, 32:]}
    return x, {"digit": digits.astype("int32"), "ink": images.mean(axis=1, keepdims=True)}


def in_keras(model):
    import keras

    x, y = halves_and_ink()
    model.compile(
        optimizer=keras.optimizers.RMSprop(2e-3, epsilon=1e-7),
        loss={"digit": "sparse_categorical_crossentropy", "ink": "mse"},
        loss_weights={"digit": 1.0, "ink": 10.0},
        metrics={"digit": ["accuracy"], "ink": ["mae"]},
    )
    history = model.fit(x, y, batch_size=64, epochs=5, shuffle=False, verbose=0)
    results = model.evaluate(x, y, batch_size=64, verbose=0, return_dict=True)
    return history.history, results, model.predict(x, verbose=0)


def in_flaxfit(model):
    import optax

    x, y = halves_and_ink()
    model.compile(
        optimizer=optax.rmsprop(2e-3, eps=1e-7),
        loss={"digit": "sparse_categorical_crossentropy", "ink": "mse"},
        loss_weights={"digit": 1.0, "ink": 10.0},
        metrics={"digit": ["accuracy"], "ink": ["mae"]},
    )
    history = model.fit(x, y, batch_size=64, epochs=5, shuffle=False, verbose=0)
    results = model.evaluate(x, y, batch_size=64, verbose=0, return_dict=True)
    return history.history, results, model.predict(x, verbose=0)


def keras_model(keras):
    layers = keras.layers
    inputs = {name: keras.Input((32,), name=name) for name in ("upper", "lower")}
    halves = [
        layers.Dense(32, activation="relu", name=f"of_{name}")(half)
        for name, half in inputs.items()
    ]
    both = layers.Concatenate()(halves)
    outputs = {
        "digit": layers.Dense(10, activation="softmax", name="digit")(both),
        "ink": layers.Dense(1, name="ink")(both),
    }
    return keras.Model(inputs, outputs)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.of_upper = nnx.Linear(32, 32, rngs=rngs)
        self.of_lower = nnx.Linear(32, 32, rngs=rngs)
        self.digit = nnx.Linear(64, 10, rngs=rngs)
        self.ink = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, upper, lower):
        halves = [nnx.relu(self.of_upper(upper)), nnx.relu(self.of_lower(lower))]
        both = jnp.concatenate(halves, axis=-1)
        return {"digit": self.digit(both), "ink": self.ink(both)}


@pytest.mark.slow
def test_both_outputs_are_learned_as_in_keras(keras):
    seed_weights()
    original = keras_model(keras)
    network = with_weights_of(original, Network(nnx.Rngs(0)))
    expected, of_keras, outputs = in_keras(original)
    found, ours, predicted = in_flaxfit(ff.Model(network))
    assert expected.keys() == found.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4)
    assert ours == pytest.approx(of_keras, rel=1e-4)
    np.testing.assert_allclose(predicted["ink"], outputs["ink"], atol=1e-3)
    assert ours["digit_accuracy"] > 0.8


def test_the_port_changes_few_lines():
    assert n_changed_lines(in_keras, in_flaxfit) <= N_LINES
