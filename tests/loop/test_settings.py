"""What a training loop says of itself."""

import jax
import numpy as np
import optax
from flax import linen as nn

import flaxfit as ff

X = np.full((8, 3), 0.125, np.float32)


def test_the_repr_of_a_loop_is_one_line_without_data_or_weights():
    strategy = ff.DataParallel(jax.devices()[:1])
    task = ff.TrainTask(nn.Dense(1), optax.sgd(0.1), "mse", (X, X[:, :1]))
    loop = ff.TrainLoop(
        nn.Dense(1), task, 0, n_steps_per_checkpoint=5, n_steps=10, strategy=strategy, stdout=False
    )
    assert repr(loop) == (
        f"TrainLoop(mse, step=0, n_steps=10, n_steps_per_checkpoint=5, {strategy}, 4 params)"
    )
