"""A script in Keras that generates batches, one class of which is rare, and its port."""

import numpy as np
import pytest
from flax import nnx
from keras_scripts import N_LINES, n_changed_lines, seed_weights, with_weights_of

import flaxfit as ff


def in_keras(model):
    import keras
    from sklearn.datasets import make_moons

    class Moons(keras.utils.PyDataset):
        def __init__(self, n_batches, seed):
            super().__init__()
            self.n_batches, self.seed = n_batches, seed

        def __len__(self):
            return self.n_batches

        def __getitem__(self, i):
            x, y = make_moons((90, 10), noise=0.2, random_state=1000 * self.seed + i)
            return x.astype("float32"), y.astype("int32")

    model.compile(
        optimizer=keras.optimizers.Adam(0.01, epsilon=1e-7),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    history = model.fit(
        Moons(40, seed=0),
        epochs=4,
        shuffle=False,
        class_weight={0: 1.0, 1: 9.0},
        validation_data=Moons(5, seed=100),
        verbose=0,
    )
    results = model.evaluate(Moons(10, seed=200), verbose=0, return_dict=True)
    outputs = model.predict_on_batch(Moons(1, seed=300)[0][0])
    return history.history, results, outputs


def in_flaxfit(model):
    import optax
    from sklearn.datasets import make_moons

    class Moons:
        def __init__(self, n_batches, seed):
            super().__init__()
            self.n_batches, self.seed = n_batches, seed

        def __len__(self):
            return self.n_batches

        def __getitem__(self, i):
            x, y = make_moons((90, 10), noise=0.2, random_state=1000 * self.seed + i)
            return x.astype("float32"), y.astype("int32")

    model.compile(
        optimizer=optax.adam(0.01, eps=1e-7),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    history = model.fit(
        Moons(40, seed=0),
        epochs=4,
        shuffle=False,
        class_weight={0: 1.0, 1: 9.0},
        validation_data=Moons(5, seed=100),
        verbose=0,
    )
    results = model.evaluate(Moons(10, seed=200), verbose=0, return_dict=True)
    outputs = model.predict_on_batch(Moons(1, seed=300)[0][0])
    return history.history, results, outputs


def keras_model(keras):
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(16, activation="relu", name="hidden"),
            layers.Dense(2, activation="softmax", name="scores"),
        ]
    )


class Network(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(2, 16, rngs=rngs)
        self.scores = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x):
        return self.scores(nnx.relu(self.hidden(x)))


@pytest.mark.slow
def test_a_rare_class_is_learned_as_in_keras(keras):
    seed_weights()
    original = keras_model(keras)
    network = with_weights_of(original, Network(nnx.Rngs(0)))
    expected, of_keras, outputs = in_keras(original)
    found, ours, predicted = in_flaxfit(ff.Model(network))
    assert expected.keys() == found.keys()
    for name in ("val_loss", "val_accuracy"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-3)
    # The loss of Keras divides by the number of examples, ours by the sum of their weights.
    np.testing.assert_allclose(np.multiply(found["loss"], 1.8), expected["loss"], rtol=1e-3)
    assert ours == pytest.approx(of_keras, rel=1e-3)
    assert (predicted.argmax(1) == outputs.argmax(1)).all()
    assert ours["accuracy"] > 0.85


def test_the_port_changes_few_lines():
    assert n_changed_lines(in_keras, in_flaxfit) <= N_LINES
