"""The reprs of tasks name what was set, and never show data."""

import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import flaxfit as ff
from flaxfit.metrics import mean

X = np.full((8, 3), 0.125, np.float32)


def test_a_task_shows_what_differs_from_the_defaults():
    task = ff.TrainTask(nn.Dense(1), optax.sgd(0.1), "mse", (X, X), ["mae"], clip_norm=1.0)
    assert repr(task) == (
        "TrainTask(apply=Dense, loss=mse, data=(float32[8, 3], float32[8, 3]), metrics=[mae], "
        "clip_norm=1.0)"
    )


def test_an_optimizer_that_knows_its_name_is_shown():
    optimizer = ff.optim.OptimizerDef(optax.adam, learning_rate=0.1)
    module = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    task = ff.TrainTask(module, optimizer, "mae")
    assert repr(task) == (
        "TrainTask(apply=Linear, optimizer=OptimizerDef(adam, learning_rate), loss=mae)"
    )


def test_losses_of_several_outputs_are_shown_by_name():
    task = ff.TrainTask(nn.Dense(1), optax.sgd(0.1), {"a": "mse", "b": "mae"})
    assert repr(task) == ("TrainTask(apply=Dense, loss={a: mse, b: mae}, metrics=[a_loss, b_loss])")


def test_data_is_shown_by_shape_or_by_type():
    def task(data):
        return repr(ff.EvalTask(nn.Dense(1), {"size": mean(len)}, data))

    assert task({"x": X}) == "EvalTask(apply=Dense, metrics=[size], data={x: float32[8, 3]})"
    assert task([(X, X)]) == "EvalTask(apply=Dense, metrics=[size], data=list)"
    stream = ff.ArrayStream(X, X, batch_size=4)
    assert task(stream) == f"EvalTask(apply=Dense, metrics=[size], data={stream})"
    assert all("0.125" not in task(data) for data in ({"x": X}, [(X, X)], stream))


def test_functions_are_shown_by_name():
    def own_step(state, batch):
        return state, {}

    assert repr(ff.TrainTask(step=own_step)) == "TrainTask(step=own_step)"
