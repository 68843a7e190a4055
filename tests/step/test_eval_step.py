"""The pure steps without a gradient: measuring and predicting."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxfit as ff
from flaxfit.step._eval_step import evaluated
from flaxfit.step._metric_totals import compute
from flaxfit.step._random import eval_key

rng = np.random.default_rng(1)
X = rng.normal(size=(12, 3)).astype(np.float32)
Y = X.sum(1)
W = rng.uniform(0.1, 3, size=12).astype(np.float32)
PARAMS = np.array([0.5, -1.0, 2.0], np.float32)
STATE = ff.TrainState.create(optax.sgd(1.0), {"params": PARAMS}, key=0)


def linear(variables, x):
    return x @ variables["params"]


def noisy(variables, x, rngs):
    return x[:, 0] + jax.random.uniform(rngs["dropout"])


def test_evaluation_measures_without_touching_the_state():
    task = ff.EvalTask(linear, ["mae"], loss="mse")
    sums = jax.jit(ff.make_eval_step(task))(STATE.for_inference(), ff.Batch((X,), (Y,), W))
    metrics = compute(sums, task.metrics)
    errors = X @ PARAMS - Y
    assert metrics["loss"] == pytest.approx(np.average(errors**2, weights=W), rel=1e-5)
    assert metrics["mae"] == pytest.approx(np.average(np.abs(errors), weights=W), rel=1e-5)


def test_streams_have_keys_by_the_position_of_the_batch():
    predict = ff.make_predict_step(noisy, rngs=("dropout",))
    outputs = [predict(STATE, ff.Batch((X,)), position)[0] for position in (0, 1)]
    for position, output in enumerate(outputs):
        key = jax.random.fold_in(eval_key(STATE, position, 0), 0)
        assert float(output) == float(X[0, 0] + jax.random.uniform(key))
    assert outputs[0] != outputs[1]


def test_evaluation_keeps_of_a_state_what_it_needs():
    inference = STATE.for_inference()
    assert evaluated(inference, (), "It") is inference
    assert not hasattr(evaluated(STATE, (), "It"), "opt_state")
    stochastic = evaluated(STATE.replace(opt_state=(jnp.ones(2),)), ("dropout",), "It")
    assert stochastic.opt_state == () and stochastic.key is STATE.key


def test_streams_need_a_state_with_a_key():
    with pytest.raises(ValueError, match="It needs the random key of a TrainState, got an Infer"):
        evaluated(STATE.for_inference(), ("dropout",), "It")
