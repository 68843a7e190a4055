"""Own the loop: iterate over checkpoints, evaluate, stop, and continue.

    python examples/02_loop.py

`Model.fit` is a thin layer over what happens here, and can do nothing more.
"""

import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import flaxfit as ff


class MLP(nnx.Module):
    """One hidden layer with dropout, which takes its random streams in the call."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 256, rngs=rngs)
        self.dropout = nnx.Dropout(0.2)
        self.out = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x, rngs=None):
        return self.out(self.dropout(nnx.relu(self.hidden(x)), rngs=rngs))


def main():
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images / 16, labels, test_size=0.2, random_state=0)

    # What to train, and what to measure: plain descriptions.
    net = MLP(nnx.Rngs(0))
    task = ff.TrainTask(
        apply=net,
        optimizer=optax.adamw(3e-3),
        loss="crossentropy",
        data=ff.ArrayStream(x, y, batch_size=32, shuffle=True),
        metrics=["accuracy"],
    )
    measure = ff.EvalLoop(ff.EvalTask(net, ["accuracy"], (x_test, y_test)), name="test")

    # Nothing runs until your loop asks for it: a checkpoint every 50 steps, the first at step 50.
    loop = ff.TrainLoop(net, task, 0, n_steps=2000, n_steps_per_checkpoint=50, first_checkpoint=50)
    for checkpoint in loop:
        checkpoint = measure(checkpoint)
        print(checkpoint)
        if checkpoint.metrics["test_accuracy"] >= 0.97:
            break

    # The loop is still there: one more step, then on to the next checkpoint.
    print("one step more:", loop.next_step().step)
    last = measure(loop.next_checkpoint())

    # A checkpoint gives its network, trained and in evaluation mode.
    right = (last.module()(x_test).argmax(-1) == y_test).sum()
    print(f"{right} of {len(y_test)} are correct")
    print(f"stopped at step {last.step}, test accuracy {last.metrics['test_accuracy']:.4f}")


if __name__ == "__main__":
    main()
