"""From process start to a trained digits model: flaxfit and Keras 3 on JAX.

    python -m benchmarks.digits [--rounds 5]

Each run is a process of its own, cold, and ends by printing its test accuracy: the same network,
data, batch size, optimizer, number of epochs and validation. Rounds alternate; the figure to
quote is the median of the ratios of the rounds.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

SHARED = """
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
images, labels = load_digits(return_X_y=True)
x, x_test, y, y_test = train_test_split(images / 16, labels, test_size=0.2, random_state=0)
"""
FLAXFIT = (
    SHARED
    + """
import optax
from flax import linen as nn
import flaxfit as ff

class MLP(nn.Module):
    train: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(256)(x))
        x = nn.Dropout(0.2, deterministic=not self.train)(x)
        return nn.Dense(10)(x)

model = ff.Model(MLP(), optax.adam(3e-3), "crossentropy", metrics=["accuracy"])
model.fit(x, y, epochs=10, validation_data=(x_test, y_test))
print(model.evaluate(x_test, y_test)["accuracy"])
"""
)
KERAS = (
    SHARED
    + """
import keras
from keras import layers
model = keras.Sequential([
    layers.Input((64,)), layers.Dense(256, activation="relu"), layers.Dropout(0.2),
    layers.Dense(10),
])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
model.fit(x, y, batch_size=32, epochs=10, validation_data=(x_test, y_test), verbose=2)
print(model.evaluate(x_test, y_test, verbose=0, return_dict=True)["accuracy"])
"""
)


def main() -> None:
    """Prints seconds for the whole process and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    times = {"Keras 3 on JAX": [], "flaxfit": []}
    scripts = {"Keras 3 on JAX": KERAS, "flaxfit": FLAXFIT}
    accuracies = {}
    for i in range(rounds + 1):
        for name, script in scripts.items():
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", script],
                env={**os.environ, "KERAS_BACKEND": "jax"},
                capture_output=True,
                text=True,
                check=True,
            )
            accuracies[name] = float(done.stdout.split()[-1])
            if i:  # The first round only fills the file caches.
                times[name].append(time.perf_counter() - start)
    for name, seconds in times.items():
        pairs = zip(seconds, times["Keras 3 on JAX"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        print(
            f"{name:16} {statistics.median(seconds):6.2f} s   min {min(seconds):5.2f}"
            f"   x Keras {ratio:.2f}   (test accuracy {accuracies[name]:.4f})"
        )


if __name__ == "__main__":
    main()
