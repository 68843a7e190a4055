"""The average that is used in the place of the trained parameters, of schedule-free optimizers."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from loops import assert_close, waves
from marks import thorough, usual

import flaxfit as ff
from flaxfit.optim import MultiOptimizer, OptimizerDef, averaged, eval_params
from flaxfit.optim._averaged import schedule_free_states

free = optax.contrib.schedule_free_sgd
X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2)
Y = X.sum(1, keepdims=True)
ONE = ff.DataParallel(jax.devices()[:1])
WRAPPED = {
    "bare": lambda: free(0.3),
    "adamw": lambda: optax.contrib.schedule_free_adamw(0.1),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), free(0.3)),
    "definition": lambda: OptimizerDef(free, learning_rate=0.3),
    "injected": lambda: optax.inject_hyperparams(free)(learning_rate=0.3),
    "steps": lambda: optax.MultiSteps(free(0.3), 2),
    "groups": lambda: MultiOptimizer((".*kernel", free(0.3)), (".*bias", optax.sgd(0.1))),
    "partition": lambda: optax.partition(
        {"a": free(0.3), "b": free(0.1, b1=0.8)}, {"bias": "a", "kernel": "b"}
    ),
}
OPTIONS = {
    "clip": {"clip_norm": 1.0},
    "freeze": {"freeze": "bias"},
    "accumulate": {"accumulate": 2},
}


def model_of(optimizer, **options):
    return ff.Model(
        nn.Dense(1, kernel_init=waves), optimizer, "mse", **{"strategy": ONE, **options}
    )


def fitted(optimizer, **options):
    model = model_of(optimizer, **options)
    model.fit(X, Y, epochs=4, batch_size=8, validation_data=(X, Y), verbose=0)
    return model


@pytest.fixture(scope="module")
def plainly_fitted():
    return fitted(free(0.3))


def expected_params(state):
    """By optax's function, for each of the states within."""
    params = dict(state.params)
    for node in schedule_free_states(state.opt_state):
        z = {name: z for name, z in node.z.items() if not isinstance(z, optax.MaskedNode)}
        own = {name: params[name] for name in z}
        params |= optax.contrib.schedule_free_eval_params(node._replace(z=z), own)
    return params


def loss_of(params):
    return float(np.mean((X @ params["kernel"] + params["bias"] - Y) ** 2))


def check(model, tmp_path):
    state = model.state
    expected = expected_params(state)
    np.testing.assert_array_equal(eval_params(state)["kernel"], averaged(state).params["kernel"])
    assert abs(loss_of(expected) - loss_of(state.params)) > 1e-3
    np.testing.assert_allclose(model.evaluate(X, Y)["loss"], loss_of(expected), rtol=1e-4)
    np.testing.assert_allclose(model.history["val_loss"][-1], loss_of(expected), rtol=1e-4)
    predicted = X @ expected["kernel"] + expected["bias"]
    np.testing.assert_allclose(model.predict(X), predicted, rtol=1e-4, atol=1e-6)
    model.save_weights(tmp_path / "w.safetensors")
    saved = ff.checkpoints.load_weights(tmp_path / "w.safetensors")["params"]
    assert_close(saved, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", usual("groups", "steps", of=WRAPPED))
def test_a_model_uses_the_average_of_a_schedule_free_optimizer(wrapped, tmp_path):
    check(fitted(WRAPPED[wrapped]()), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("option", usual("accumulate", of=OPTIONS))
def test_options_leave_it_so(option, tmp_path):
    check(fitted(free(0.3), **OPTIONS[option]), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        thorough(lambda: ff.DataParallel(jax.devices()[:1])),
        thorough(lambda: ff.Sharded.fsdp(jax.devices()[:4])),
        lambda: ff.DataParallel(virtual_replicas=4),
    ],
    ids=["one", "fsdp", "virtual"],
)
def test_it_is_so_under_every_strategy(strategy, tmp_path):
    check(fitted(free(0.3), strategy=strategy()), tmp_path)


@pytest.mark.slow
def test_a_saved_state_is_used_in_the_same_way_before_a_fit(plainly_fitted, tmp_path):
    model = plainly_fitted
    model.save(tmp_path)
    other = model_of(free(0.3))
    other.load(tmp_path)
    np.testing.assert_array_equal(other.predict(X), model.predict(X))


@pytest.mark.slow
def test_weights_that_were_saved_are_used_to_the_bit(plainly_fitted, tmp_path):
    model = plainly_fitted
    model.save_weights(tmp_path / "w.safetensors")
    other = model_of(free(0.3))
    other.load_weights(tmp_path / "w.safetensors", partial=".*")
    np.testing.assert_array_equal(other.predict(X), model.predict(X))


@pytest.mark.slow
def test_an_eval_loop_measures_the_average_if_asked(plainly_fitted):
    model = plainly_fitted
    task = ff.EvalTask(nn.Dense(1).apply, [], (X, Y), loss="mse")
    of_average, plain = (ff.EvalLoop(task, ema=ema).measure(model.state) for ema in (True, False))
    np.testing.assert_allclose(of_average["loss"], model.evaluate(X, Y)["loss"], rtol=1e-6)
    np.testing.assert_allclose(plain["loss"], loss_of(model.state.params), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["model", thorough("callback")])
def test_an_exported_model_is_that_of_the_average(how, tmp_path):
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")
    path = tmp_path / "dense"
    model = model_of(free(0.3))
    export = ff.callbacks.Export(path, monitor=None, gradients=False)
    callbacks = [export] if how == "callback" else []
    model.fit(X, Y, epochs=4, batch_size=8, callbacks=callbacks, verbose=0)
    if how == "model":
        model.export(path, gradients=False)
    np.testing.assert_allclose(ff.export.load(path)(X), model.predict(X), rtol=1e-5)


def test_a_moving_average_beside_it_is_refused():
    with pytest.raises(ValueError, match="averages the parameters itself. Leave ema out"):
        fitted(free(0.3), ema=0.9)


def test_a_state_that_cannot_be_swapped_says_what_to_use(plainly_fitted):
    state = plainly_fitted.state
    with pytest.raises(ValueError, match=r"use flaxfit\.optim\.averaged"):
        ff.optim.swap_ema(state)
    with pytest.raises(ValueError, match="holds no moving average"):
        averaged(ff.TrainState.create(optax.sgd(0.1), {"params": state.params}))


@pytest.mark.slow
def test_an_optimizer_of_reshaped_parameters_is_refused():
    with pytest.raises(ValueError, match="Remove transformations that reshape or rename"):
        fitted(optax.flatten(free(0.3)))
