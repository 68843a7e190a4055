"""Train a small network on real handwritten digits with `Model.fit`.

    python examples/01_digits.py

The 1,797 images come with scikit-learn: nothing is downloaded.
"""

import optax
from flax import linen as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import flaxfit as ff


class MLP(nn.Module):
    """One hidden layer with dropout."""

    train: bool = False  # `fit` trains with True; `evaluate` and `predict` see False

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(256)(x))
        x = nn.Dropout(0.2, deterministic=not self.train)(x)
        return nn.Dense(10)(x)


def main():
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images / 16, labels, test_size=0.2, random_state=0)

    model = ff.Model(MLP(), optax.adam(3e-3), "crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, epochs=10, validation_data=(x_test, y_test))
    print(history)

    predicted = model.predict(x_test[:10]).argmax(-1)
    print("predicted", *predicted)
    print("labels   ", *y_test[:10])
    print(f"test accuracy {model.evaluate(x_test, y_test)['accuracy']:.4f}")


if __name__ == "__main__":
    main()
