"""SwapEMA: the moving average is in the place of the parameters when training has ended."""

import flax.linen as nn
import numpy as np
import optax
import pytest
from loops import assert_equal, init_of

import flaxfit as ff
from flaxfit.callbacks import SwapEMA
from flaxfit.optim import swap_ema

x = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]


def make_loop(callbacks, ema=0.9):
    task = ff.TrainTask(nn.Dense(1).apply, optax.sgd(0.1), "mse", (x, 3 * x), ema=ema)
    options = {"n_steps": 5, "callbacks": callbacks, "stdout": False}
    return ff.TrainLoop(init_of(nn.Dense(1), 1), task, 0, **options)


@pytest.mark.slow
def test_the_average_is_in_place_when_training_has_ended_and_only_then():
    plain, loop = make_loop([]), make_loop([SwapEMA()])
    for a, b in zip(plain, loop, strict=True):
        assert_equal(a.state.params, b.state.params)
    assert_equal(loop.state.params, swap_ema(plain.state).params)
    loop.close()  # It does not swap back.
    assert_equal(loop.state.params, swap_ema(plain.state).params)


def test_a_loop_without_an_average_is_refused():
    with pytest.raises(ValueError, match="holds no moving average"):
        make_loop([SwapEMA()], ema=None)


def test_a_model_uses_the_average_by_itself():
    model = ff.Model(nn.Dense(1), optax.sgd(0.1), "mse", ema=0.9)
    with pytest.raises(ValueError, match="SwapEMA is for loops"):
        model.fit(x, 3 * x, callbacks=[SwapEMA()], verbose=0)
