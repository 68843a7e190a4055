"""Keras 3 on JAX: `fit`, `evaluate` and `predict`, with its bar."""

import os
from typing import Any

import numpy as np

# Keras reads it once, when it is imported.
os.environ["KERAS_BACKEND"] = "jax"

import keras
from keras import layers

from benchmarks.contenders import Contender
from benchmarks.workloads import Workload

_LINEN_NAMES = {
    "gamma": "scale",
    "beta": "bias",
    "embeddings": "embedding",
    "attention_output": "out",
}


def make(
    workload: Workload,
    params: Any = None,
    *,
    steps_per_execution: int = 1,
    jit_compile: bool | str = "auto",
) -> Contender:
    """A compiled Keras model, whose `fit` takes the arrays."""
    inputs = keras.Input(workload.x.shape[1:], dtype=str(workload.x.dtype))
    model = keras.Model(inputs, _NETWORKS[workload.name](inputs, workload))
    if params is not None:
        _carry_over(params, model)
    model.compile(
        keras.optimizers.Adam(workload.learning_rate, epsilon=1e-8),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
        jit_compile=jit_compile,
    )
    x, y, batch_size = workload.x, workload.y, workload.batch_size

    def train(epochs: int) -> float:
        history = model.fit(
            x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=1
        ).history
        return history["loss"][-1]

    def evaluate() -> tuple[float, float]:
        loss, accuracy = model.evaluate(x, y, batch_size=batch_size, verbose=0)
        return loss, accuracy

    def predict() -> np.ndarray:
        return model.predict(x, batch_size=batch_size, verbose=0)

    return Contender(model.count_params, train, evaluate, predict)


def _carry_over(params: Any, model: keras.Model) -> None:
    """Sets the parameters of the model to those of the Linen layers of the same names."""
    from benchmarks.linen_models import by_path

    arrays = by_path(params)
    for variable in model.trainable_variables:
        path = "/".join(_LINEN_NAMES.get(part, part) for part in variable.path.split("/"))
        variable.assign(arrays.pop(path))
    if arrays:
        raise SystemExit(f"The Keras model of {model.name} has no place for {sorted(arrays)}.")


def _mlp(x: Any, workload: Workload) -> Any:
    x = layers.Dense(workload.sizes[0], activation="relu", name="Dense_0")(x)
    return layers.Dense(workload.n_classes, name="Dense_1")(x)


def _cnn(x: Any, workload: Workload) -> Any:
    first, second, width = workload.sizes
    drawn = {"kernel_initializer": "lecun_normal"}  # As in linen: a model learns otherwise.
    hidden = {"activation": "relu", **drawn}
    for i, features in enumerate((first, second)):
        x = layers.Conv2D(features, 3, padding="same", name=f"Conv_{i}", **hidden)(x)
        x = layers.AveragePooling2D(2)(x)
    x = layers.Dense(width, name="Dense_0", **hidden)(layers.Flatten()(x))
    return layers.Dense(workload.n_classes, name="Dense_1", **drawn)(x)


def _transformer(x: Any, workload: Workload) -> Any:
    width, n_layers, n_heads, length = workload.sizes
    x = _embedding(workload.n_classes, width, "Embed_0")(x)
    x = _Positions(length, width, name="Embed_1")(x)
    for i in range(n_layers):
        normed = _norm(2 * i)(x)
        name = f"MultiHeadDotProductAttention_{i}"
        attention = layers.MultiHeadAttention(n_heads, width // n_heads, name=name)
        x = x + attention(normed, normed, use_causal_mask=True)
        hidden = layers.Dense(4 * width, name=f"Dense_{2 * i}")(_norm(2 * i + 1)(x))
        hidden = keras.activations.gelu(hidden, approximate=True)
        x = x + layers.Dense(width, name=f"Dense_{2 * i + 1}")(hidden)
    return layers.Dense(workload.n_classes, name=f"Dense_{2 * n_layers}")(_norm(2 * n_layers)(x))


class _Positions(layers.Layer):
    def __init__(self, length, width, **options):
        super().__init__(**options)
        self.embeddings = self.add_weight((length, width), _as_in_linen(width), name="embeddings")

    def call(self, x):
        return x + self.embeddings


def _embedding(n: int, width: int, name: str) -> Any:
    return layers.Embedding(n, width, _as_in_linen(width), name=name)


def _as_in_linen(width: int) -> Any:
    """Linen's initializer of embeddings: with Keras's smaller values a model learns differently."""
    return keras.initializers.RandomNormal(stddev=width**-0.5)


def _norm(i: int) -> Any:
    return layers.LayerNormalization(epsilon=1e-6, name=f"LayerNorm_{i}")


def _recommender(x: Any, workload: Workload) -> Any:
    n_ids, width = workload.sizes
    user = _embedding(n_ids, width, "Embed_0")(x[:, 0])
    item = _embedding(n_ids, width, "Embed_1")(x[:, 1])
    x = layers.Concatenate()([user, item, user * item])
    x = layers.Dense(2 * width, activation="relu", name="Dense_0")(x)
    return layers.Dense(workload.n_classes, name="Dense_1")(x)


_NETWORKS = {
    "mlp": _mlp,
    "cnn": _cnn,
    "transformer": _transformer,
    "recommender": _recommender,
}
