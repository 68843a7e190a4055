"""The reprs of tasks name what was set, and never show data."""

import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import flaxfit as ff
from flaxfit.metrics import mean

X = np.full((8, 3), 0.125, np.float32)


def own_step(state, batch):
    return state, {}


LINEAR = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
SGD = optax.sgd(0.1)
ADAM = ff.optim.OptimizerDef(optax.adam, learning_rate=0.1)


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (
            ff.TrainTask(nn.Dense(1), SGD, "mse", (X, X), ["mae"], clip_norm=1.0),
            "apply=Dense, loss=mse, data=(float32[8, 3], float32[8, 3]), metrics=[mae], "
            "clip_norm=1.0",
        ),
        (
            ff.TrainTask(LINEAR, ADAM, "mae"),
            "apply=Linear, optimizer=OptimizerDef(adam, learning_rate), loss=mae",
        ),
        (
            ff.TrainTask(nn.Dense(1), SGD, {"a": "mse", "b": "mae"}),
            "apply=Dense, loss={a: mse, b: mae}, metrics=[a_loss, b_loss]",
        ),
        (ff.TrainTask(step=own_step), "step=own_step"),
    ],
)
def test_a_task_shows_what_differs_from_the_defaults(task, text):
    assert repr(task) == f"TrainTask({text})"


def test_data_is_shown_by_shape_or_by_type():
    def task(data):
        return repr(ff.EvalTask(nn.Dense(1), {"size": mean(len)}, data))

    assert task({"x": X}) == "EvalTask(apply=Dense, metrics=[size], data={x: float32[8, 3]})"
    assert task([(X, X)]) == "EvalTask(apply=Dense, metrics=[size], data=list)"
    stream = ff.ArrayStream(X, X, batch_size=4)
    assert task(stream) == f"EvalTask(apply=Dense, metrics=[size], data={stream})"
    assert all("0.125" not in task(data) for data in ({"x": X}, [(X, X)], stream))
