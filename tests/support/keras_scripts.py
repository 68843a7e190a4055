"""What scripts in Keras and their ports share: first weights, and a count of changed lines."""

import difflib
import inspect
import random

import jax.numpy as jnp
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

N_LINES = 5
"""The most lines outside the model that a port changes."""
_NAMES = {
    "gamma": "scale",
    "beta": "bias",
    "moving_mean": "mean",
    "moving_variance": "var",
    "embeddings": "embedding",
}


def digits(shape=(64,)):
    """Images of digits and their classes: (x_train, x_test, y_train, y_test)."""
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, *shape).astype("float32") / 16
    return train_test_split(x, y.astype("int32"), random_state=0)


def n_changed_lines(script, port):
    """The lines that a port of a script changes or adds; the first, `def`, and empty ones aside.

    >>> n_changed_lines(with_weights_of, with_weights_of)
    0
    """
    bodies = [
        list(filter(str.strip, inspect.getsource(f).splitlines()[1:])) for f in (script, port)
    ]
    signs = [line[0] for line in difflib.ndiff(*bodies)]
    return max(signs.count("-"), signs.count("+"))


def seed_weights():
    """Lets layers of Keras draw the same weights each time.

    `keras.utils.set_random_seed` imports TensorFlow for this, which takes seconds.
    """
    random.seed(0)


def with_weights_of(model, module):
    """An nnx module whose layers get the weights of the layers of that name of a Keras model."""
    for layer in model.layers:
        for weight in layer.weights:
            name = _NAMES.get(weight.name, weight.name)
            # Copied: training gives its buffers away.
            getattr(getattr(module, layer.name), name).set_value(jnp.array(weight))
    return module
