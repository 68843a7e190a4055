"""Kill a training run at any moment, start it again, and get exactly the same model.

    python examples/04_resume.py --kill    # dies by SIGKILL at a random step
    python examples/04_resume.py           # goes on, to the end

All it takes is `checkpoint_dir`. The digest of the weights that the last line but one shows is
that of a run that nothing happened to.
"""

import argparse
import hashlib
import os
import random
import signal

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import flaxfit as ff


class Net(nn.Module):
    """A hidden layer with batch normalization and dropout: the state is not only parameters."""

    train: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(128)(x))
        x = nn.BatchNorm(use_running_average=not self.train)(x)
        x = nn.Dropout(0.2, deterministic=not self.train)(x)
        return nn.Dense(10)(x)


class Kill:
    """A callback that kills its process at a step, in the middle of whatever it is doing."""

    def __init__(self, step):
        self.step = step

    def attach(self, loop):
        loop.watchers.append(self.watch)

    def watch(self, step):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self, checkpoint):
        return checkpoint


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", default="digits-run")
    parser.add_argument("--kill", action="store_true", help="die at one of the next 200 steps")
    arguments = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images / 16, labels, test_size=357, random_state=0)

    done = ff.checkpoints.latest(arguments.folder) or 0
    model = ff.Model(Net(), optax.adam(3e-3), "crossentropy", metrics=["accuracy"])
    model.fit(
        x,
        y,
        epochs=10,
        validation_data=(x_test, y_test),
        callbacks=[Kill(done + random.randint(1, 200))] if arguments.kill else [],
        checkpoint_dir=arguments.folder,
    )
    weights = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(model.state.params))
    print("digest of the weights", hashlib.sha256(weights).hexdigest())
    print(f"test accuracy {model.evaluate(x_test, y_test)['accuracy']:.4f}")


if __name__ == "__main__":
    main()
