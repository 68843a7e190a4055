"""Own the loop: train the digits with a `for` of your own, evaluate, stop, and go on.

    python examples/02_loop.py

`Model.fit` is a few lines over what happens here, and can do nothing more.
"""

import jax
import optax
from flax import linen as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import flaxfit as ff


class MLP(nn.Module):
    """One hidden layer with dropout."""

    train: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(256)(x))
        x = nn.Dropout(0.2, deterministic=not self.train)(x)
        return nn.Dense(10)(x)


def main():
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images / 16, labels, test_size=0.2, random_state=0)

    # What to train, and what to measure: plain descriptions.
    task = ff.TrainTask(
        apply=MLP(train=True).apply,
        optimizer=optax.adamw(3e-3),
        loss="crossentropy",
        data=ff.ArrayStream(x, y, batch_size=32, shuffle=True),
        metrics=["accuracy"],
    )
    measure = ff.EvalLoop(ff.EvalTask(MLP().apply, ["accuracy"], (x_test, y_test)), name="test")

    # Nothing runs until your `for` asks for it: a checkpoint every 50 steps, the first at step 50.
    loop = ff.TrainLoop(
        MLP().init,
        task,
        jax.random.key(0),
        n_steps=2000,
        n_steps_per_checkpoint=50,
        first_checkpoint=50,
    )
    for checkpoint in loop:
        checkpoint = measure(checkpoint)
        print(checkpoint)
        if checkpoint.metrics["test_accuracy"] >= 0.97:
            break

    # The loop is still there: one more step, then on to the next checkpoint.
    print("one step more:", loop.next_step().step)
    last = measure(loop.next_checkpoint())
    print(f"stopped at step {last.step}, test accuracy {last.metrics['test_accuracy']:.4f}")


if __name__ == "__main__":
    main()
