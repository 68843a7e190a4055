"""A script in Keras that learns images, augmented, with callbacks; and its port."""

import csv

import jax
import numpy as np
import pytest
from flax import nnx
from keras_scripts import N_LINES, digits, n_changed_lines, seed_weights, with_weights_of

import flaxfit as ff


def shifted(x, y, batch_size):
    rng = np.random.default_rng(0)
    while True:
        for i in range(0, len(x) - batch_size + 1, batch_size):
            rows = slice(i, i + batch_size)
            yield np.roll(x[rows], rng.integers(-1, 2, 2), axis=(1, 2)), y[rows]


def in_keras(model, folder):
    import keras
    from keras.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint, ReduceLROnPlateau

    x_train, x_test, y_train, y_test = digits((8, 8, 1))
    model.compile(
        optimizer=keras.optimizers.RMSprop(0.003),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    model.fit(
        shifted(x_train, y_train, batch_size=64),
        steps_per_epoch=len(x_train) // 64,
        epochs=8,
        shuffle=False,
        validation_data=(x_test, y_test),
        callbacks=[
            CSVLogger(folder / "log.csv"),
            ReduceLROnPlateau("val_loss", factor=0.7, patience=1, min_delta=0.2),
            EarlyStopping("val_loss", min_delta=0.1, patience=2, restore_best_weights=True),
            ModelCheckpoint(folder / "best.keras", save_best_only=True),
        ],
        verbose=2,
    )
    return model.evaluate(x_test, y_test, verbose=0, return_dict=True)


def in_flaxfit(model, folder):
    import optax

    from flaxfit.callbacks import CSVLogger, EarlyStopping, ReduceLROnPlateau
    from flaxfit.checkpoints import CheckpointFileWriter

    x_train, x_test, y_train, y_test = digits((8, 8, 1))
    model.compile(
        optimizer=optax.rmsprop(0.003, eps=1e-7),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    model.fit(
        shifted(x_train, y_train, batch_size=64),
        steps_per_epoch=len(x_train) // 64,
        epochs=8,
        shuffle=False,
        validation_data=(x_test, y_test),
        callbacks=[
            CSVLogger(folder / "log.csv"),
            ReduceLROnPlateau("val_loss", factor=0.7, patience=1, min_delta=0.2),
            EarlyStopping("val_loss", min_delta=0.1, patience=2, restore_best_weights=True),
            CheckpointFileWriter(folder / "best", monitor="val_loss", keep=1),
        ],
        verbose=2,
    )
    return model.evaluate(x_test, y_test, verbose=0, return_dict=True)


def keras_model(keras):
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", name="first"),
            layers.BatchNormalization(momentum=0.9, name="norm"),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu", name="second"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10, activation="softmax", name="scores"),
        ]
    )


class Network(nnx.Module):
    def __init__(self, rngs):
        options = {"param_dtype": jax.numpy.float64, "rngs": rngs}
        self.first = nnx.Conv(1, 16, (3, 3), **options)
        self.norm = nnx.BatchNorm(16, momentum=0.9, epsilon=1e-3, **options)
        self.second = nnx.Conv(16, 32, (3, 3), **options)
        self.scores = nnx.Linear(32, 10, **options)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.first(x)))
        x = nnx.relu(self.second(nnx.max_pool(x, (2, 2), (2, 2))))
        return self.scores(x.mean((1, 2)))


def logged(folder):
    with open(folder / "log.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def float64(keras):
    """Processors round differently, which in float32 changes some classes after 168 steps."""
    with jax.enable_x64(True):
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_images_are_learned_as_in_keras(keras, tmp_path, float64):
    seed_weights()
    original = keras_model(keras)
    network = with_weights_of(original, Network(nnx.Rngs(0)))
    folders = tmp_path / "keras", tmp_path / "flaxfit"
    for folder in folders:
        folder.mkdir()
    expected = in_keras(original, folders[0])
    # Keras is on one device, and the batches of a norm are those of a device.
    strategy = ff.DataParallel(jax.devices()[:1])
    found = in_flaxfit(ff.Model(network, strategy=strategy), folders[1])
    assert found == pytest.approx(expected, rel=1e-4)
    theirs, ours = map(logged, folders)
    assert len(ours) == len(theirs)
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        columns = [[float(row[name]) for row in rows] for rows in (ours, theirs)]
        np.testing.assert_allclose(*columns, rtol=1e-4)
    best = 1 + np.argmin([float(row["val_loss"]) for row in theirs])
    assert ff.checkpoints.best(folders[1] / "best") == best * 21
    assert found["accuracy"] > 0.6


def test_the_port_changes_few_lines():
    assert n_changed_lines(in_keras, in_flaxfit) <= N_LINES
