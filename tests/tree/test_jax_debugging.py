"""JAX's own switches for debugging: what they do in the debug mode, and what is said without it."""

import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loops import given
from marks import thorough

import flaxfit as ff

# As many rows as no other test has: JAX does not check operations that it compiled before.
X = np.linspace(0.1, 1, 137, dtype=np.float32)[:, None]
Y = X[:, 0]


@given
def init(rngs, x):
    return {"params": jnp.ones(x.shape[1])}


def apply(variables, x, **_):
    return x @ variables["params"], {}


def loop_over(loss="mse", **options):
    task = ff.TrainTask(apply, optax.sgd(0.1), loss, (X, Y))
    return ff.TrainLoop(init, task, 0, stdout=False, **options)


@pytest.fixture
def debug_nans():
    jax.config.update("jax_debug_nans", True)
    yield
    jax.config.update("jax_debug_nans", False)


NAMES_IT = r"run_eagerly=True\), TrainLoop\(..., debug=True\) or EvalLoop"


def logarithm(outputs, targets):
    return jnp.log(-1 - outputs**2) + targets


@pytest.mark.parametrize("is_begun", [thorough(False), True])
@pytest.mark.parametrize("make", [ff.DataParallel, ff.Sharded])
def test_a_loop_without_jit_names_the_debug_mode(make, is_begun):
    loop = loop_over(strategy=make())
    if is_begun:
        next(loop)
    with jax.disable_jit(), pytest.raises(RuntimeError, match=NAMES_IT):
        next(loop)
    assert next(loop).step == 1 + is_begun


def test_evaluation_and_prediction_without_jit_name_it_too():
    model = ff.Model(
        ff.modules.from_function(lambda p, x: x @ p, jnp.ones(1)), optax.sgd(0.1), "mse"
    )
    model.fit(X, Y, verbose=0)
    model.predict(X)
    for use in lambda: model.evaluate(X, Y), lambda: model.predict(X), loop_over:
        with jax.disable_jit(), pytest.raises(RuntimeError, match=NAMES_IT):
            use()


@pytest.mark.slow
def test_the_debug_mode_works_without_jit():
    with jax.disable_jit():
        assert np.isfinite(next(loop_over(debug=True)).loss)


@pytest.mark.slow
def test_a_nan_is_raised_at_its_operation_in_the_debug_mode(debug_nans):
    loop = loop_over(logarithm, debug=True)
    with pytest.raises(FloatingPointError, match="encountered in log") as raised:
        next(loop)
    lines = [frame.line for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert "return jnp.log(-1 - outputs**2) + targets" in lines


@pytest.mark.slow
def test_a_nan_of_a_compiled_step_names_the_debug_mode(debug_nans):
    loop = loop_over(logarithm, strategy=ff.DataParallel(jax.devices()[:1]))
    with pytest.raises(FloatingPointError, match=f"found nan.*{NAMES_IT}"):
        next(loop)


@pytest.mark.slow
def test_a_nan_of_a_compiled_measurement_names_it(debug_nans):
    task = ff.EvalTask(lambda v, x: x @ v["params"], {"log": logarithm}, (X, Y))
    evaluate = ff.EvalLoop(task, strategy=ff.DataParallel(jax.devices()[:1]))
    state = ff.InferenceState(np.int32(0), jnp.ones(1), {})
    with pytest.raises(FloatingPointError, match="found nan"):
        evaluate.measure(state)
    evaluate = ff.EvalLoop(task, strategy=ff.strategies.Eager())
    with pytest.raises(FloatingPointError, match="encountered in log"):
        evaluate.measure(state)
