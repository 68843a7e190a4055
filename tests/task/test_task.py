"""Tasks refuse what they cannot do, when they are made."""

import numpy as np
import optax
import pytest
from flax import linen as nn

import flaxfit as ff
from flaxfit.metrics import collected


def rho(outputs, targets):
    return 0.0


def test_a_training_task_refuses_a_collected_metric_and_says_where_it_belongs():
    options = {"metrics": ["mse", collected(rho)]}
    with pytest.raises(ValueError, match=r"cannot measure 'rho'.*validation_data.*EvalLoop\("):
        ff.TrainTask(lambda v, x, **_: x, optax.sgd(0.1), "mse", **options)
    with pytest.raises(ValueError, match="cannot measure 'rho'"):
        ff.TrainTask(step=lambda state, batch: (state, {}), **options)
    with pytest.raises(ValueError, match="cannot measure 'a_rho'"):
        ff.TrainTask(
            lambda v, x, **_: x, optax.sgd(0.1), {"a": "mse"}, metrics={"a": [collected(rho)]}
        )
    assert [*ff.EvalTask(lambda v, x: x, **options).metrics] == ["mse", "rho"]


def test_a_task_or_model_without_a_loss_is_told_what_takes_its_place():
    def objective(apply, batch, rngs):
        return apply(*batch.inputs)[..., 0]

    apply, x = nn.Dense(1), np.ones((4, 2), "f4")
    with pytest.raises(TypeError, match="needs loss= .such as 'crossentropy'.*objective="):
        ff.Model(apply, optax.sgd(0.1)).fit(x, verbose=0)
    for make in (ff.TrainTask, ff.Model):
        make(apply, optax.sgd(0.1), objective=objective)


def test_an_optimizer_by_name_or_uncalled_is_answered_with_a_call():
    for optimizer, advice in ("adam", "call the function"), (optax.adam, r"adam\(learning_rate\)"):
        with pytest.raises(TypeError, match=rf"Optax transformation, such as .*{advice}"):
            ff.Model(nn.Dense(1), optimizer, "mse")
