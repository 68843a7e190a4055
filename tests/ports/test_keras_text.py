"""A script in Keras that classifies texts by the words in them, and its port."""

import re
from collections import Counter
from pydoc_data.topics import topics

import numpy as np
import pytest
from flax import nnx
from keras_scripts import N_LINES, n_changed_lines, seed_weights, with_weights_of

import flaxfit as ff

N_WORDS, LENGTH = 1000, 40


def windows():
    """Windows of some texts as numbers of words, and which text each is from."""
    kinds = sorted(topics, key=lambda name: len(topics[name]))[-4:]
    texts = [re.findall(r"[a-z]+", topics[kind].lower()) for kind in kinds]
    frequent = Counter(word for text in texts for word in text).most_common(N_WORDS - 1)
    index = {word: i for i, (word, _) in enumerate(frequent, start=1)}
    found = [
        ([index.get(word, 0) for word in text[start : start + LENGTH]], label)
        for label, text in enumerate(texts)
        for start in range(0, len(text) - LENGTH, LENGTH // 2)
    ]
    order = np.random.default_rng(0).permutation(len(found))
    return tuple(np.array([found[i][part] for i in order], "int32") for part in (0, 1))


def in_keras(model):
    import keras

    x, y = windows()
    n = 4 * len(x) // 5

    model.compile(
        optimizer=keras.optimizers.RMSprop(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top_2")],
    )
    history = model.fit(
        x[:n],
        y[:n],
        batch_size=32,
        epochs=5,
        validation_data=(x[n:], y[n:]),
        validation_batch_size=128,
        shuffle=False,
        verbose=0,
    )
    results = model.evaluate(x[n:], y[n:], batch_size=128, verbose=0, return_dict=True)
    return history.history, results, model.predict(x[n:], batch_size=128, verbose=0)


def in_flaxfit(model):
    import optax

    x, y = windows()
    n = 4 * len(x) // 5

    model.compile(
        optimizer=optax.rmsprop(3e-3, eps=1e-7),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy", "top_2"],
    )
    history = model.fit(
        x[:n],
        y[:n],
        batch_size=32,
        epochs=5,
        validation_data=(x[n:], y[n:]),
        validation_batch_size=128,
        shuffle=False,
        verbose=0,
    )
    results = model.evaluate(x[n:], y[n:], batch_size=128, verbose=0, return_dict=True)
    return history.history, results, model.predict(x[n:], batch_size=128, verbose=0)


def keras_model(keras):
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((LENGTH,)),
            layers.Embedding(N_WORDS, 16, name="words"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(16, activation="relu", name="hidden"),
            layers.Dense(4, name="scores"),
        ]
    )


class Network(nnx.Module):
    def __init__(self, rngs):
        self.words = nnx.Embed(N_WORDS, 16, rngs=rngs)
        self.hidden = nnx.Linear(16, 16, rngs=rngs)
        self.scores = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.scores(nnx.relu(self.hidden(self.words(x).mean(1))))


@pytest.mark.slow
def test_texts_are_told_apart_as_in_keras(keras):
    seed_weights()
    original = keras_model(keras)
    network = with_weights_of(original, Network(nnx.Rngs(0)))
    expected, of_keras, logits = in_keras(original)
    found, ours, predicted = in_flaxfit(ff.Model(network))
    assert expected.keys() == found.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-3)
    assert ours == pytest.approx(of_keras, rel=1e-3)
    np.testing.assert_allclose(predicted, logits, atol=0.01)
    assert ours["accuracy"] > 0.8


def test_the_port_changes_few_lines():
    assert n_changed_lines(in_keras, in_flaxfit) <= N_LINES
