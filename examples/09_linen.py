"""Train a Linen module: with `Model.fit`, and then with your own loop.

    python examples/09_linen.py

Everything that the other examples do with NNX is done in the same words with Linen.
"""

import optax
from flax import linen as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import flaxfit as ff


class Net(nn.Module):
    """A hidden layer with batch normalization and dropout."""

    @nn.compact
    def __call__(self, x, train: bool):  # set by flaxfit: True in training, else False
        x = nn.relu(nn.Dense(128)(x))
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(10)(x)


def main():
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images / 16, labels, test_size=357, random_state=0)

    # The weights are initialized at the first batch, from the seed.
    model = ff.Model(Net(), optax.adam(3e-3), "crossentropy", metrics=["accuracy"], seed=0)
    model.fit(x, y, epochs=5, validation_data=(x_test, y_test))

    # A Linen module holds no weights; this one is bound to the trained ones.
    trained = model.trained()
    print("predicted", *trained(x_test[:10], train=False).argmax(-1))
    print("labels   ", *y_test[:10])

    # A task and a loop also take the module, or its functions: `Net().apply`, `Net().init`.
    stream = ff.ArrayStream(x, y, batch_size=32, shuffle=True)
    task = ff.TrainTask(Net(), optax.adam(3e-3), "crossentropy", stream, ["accuracy"])
    measure = ff.EvalLoop(ff.EvalTask(Net(), ["accuracy"], (x_test, y_test)), name="test")
    loop = ff.TrainLoop(Net(), task, 0, n_steps=200, n_steps_per_checkpoint=50, callbacks=[measure])
    for checkpoint in loop:
        print(checkpoint)
    print(f"test accuracy {checkpoint.metrics['test_accuracy']:.4f}")


if __name__ == "__main__":
    main()
