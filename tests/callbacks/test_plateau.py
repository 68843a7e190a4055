"""ReduceLROnPlateau in `fit`, with an optimizer that is plain optax."""

import numpy as np
import optax
import pytest
from flax import linen as nn

import flaxfit as ff
from flaxfit.callbacks import ReduceLROnPlateau

X = np.ones((8, 1), np.float32)


def rates_of(optimizer, **options):
    values = iter([1.0, 1.0, 0.5, 0.5, 0.5])
    model = ff.Model(nn.Dense(1), optimizer, "mse")
    history = model.fit(
        X,
        X,
        epochs=5,
        callbacks=[
            lambda checkpoint: checkpoint.with_metrics({"quality": next(values)}),
            ReduceLROnPlateau("quality", factor=0.5, patience=1, mode="min", **options),
        ],
        verbose=0,
    )
    return history["learning_rate"], history["loss"]


@pytest.mark.slow
def test_the_rate_of_a_plain_optimizer_is_lowered_as_that_of_an_optimizer_def(capsys):
    plain = rates_of(optax.sgd(0.125))
    assert plain == rates_of(ff.optim.OptimizerDef(optax.sgd, learning_rate=0.125))
    assert plain[0] == [0.125, 0.125, 0.0625, 0.0625, 0.03125]
    assert capsys.readouterr().err.count("learning rate lowered to 0.0625") == 2


@pytest.mark.slow
def test_it_is_silent_on_request(capsys):
    rates_of(optax.sgd(0.125), verbose=0)
    assert capsys.readouterr().err == ""
