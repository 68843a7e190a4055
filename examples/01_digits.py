"""Train a small network on real handwritten digits with `Model.fit`.

    python examples/01_digits.py

The 1,797 images come with scikit-learn: nothing is downloaded. `09_linen.py` does it in Linen.
"""

import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import flaxfit as ff


class MLP(nnx.Module):
    """One hidden layer with dropout, which `fit` switches on, and `evaluate` and `predict` off."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 256, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.hidden(x))))


def main():
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images / 16, labels, test_size=0.2, random_state=0)

    net = MLP(nnx.Rngs(0))
    model = ff.Model(net, optax.adam(3e-3), "crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, epochs=10, validation_data=(x_test, y_test))
    print(history)

    net.eval()  # It holds the trained weights; its mode is yours.
    print("predicted", *net(x_test[:10]).argmax(-1))
    print("labels   ", *y_test[:10])
    print(f"test accuracy {model.evaluate(x_test, y_test)['accuracy']:.4f}")


if __name__ == "__main__":
    main()
