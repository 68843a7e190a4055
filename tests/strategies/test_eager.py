"""Eager: the debug mode, in which the user's code sees values and the numbers stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from loops import assert_close, small_waves
from marks import thorough

import flaxfit as ff
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter
from flaxfit.strategies import DataParallel, Eager, Sharded

X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
Y = X.sum(1)
WEIGHTS = np.linspace(0, 1, 12).astype(np.float32)
ONE = DataParallel(jax.devices()[:1])


def init(rngs, x):
    return {"params": {"w": jnp.ones(x.shape[1])}}


def apply(variables, x, **_):
    return x @ variables["params"]["w"], {}


def run(apply=apply, data=(X, Y), *, init=init, loop=(), **options):
    data = ff.ArrayStream(*data, batch_size=8, shuffle=True, epochs=2)
    task = ff.TrainTask(apply, optax.sgd(0.1), "mse", data, ["mae"], **options)
    return [*ff.TrainLoop(init, task, 0, stdout=False, **dict(loop))]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.step == other.step
        assert_close(dict(one.metrics), dict(other.metrics), rtol=1e-6, atol=1e-6)
    assert_close(found[-1].state.params, expected[-1].state.params, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        thorough({}),
        {
            "loop": {"steps_per_call": 2, "n_steps_per_checkpoint": 3},
            "accumulate": 2,
            "data": (X, Y, WEIGHTS),
            "clip_norm": 0.1,
            "pad": False,
            "skip_nonfinite": True,
            "ema": 0.9,
        },
    ],
    ids=["plain", "all"],
)
def test_a_run_gives_the_numbers_of_compiled_steps(options):
    loop = dict(options.pop("loop", {}))
    found = run(**options, loop={"debug": True, **loop})
    assert_same(found, run(**options, loop={"strategy": ONE, **loop}))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        assert not isinstance(x, jax.core.Tracer)
        x = nn.Dense(2, kernel_init=small_waves)(x)
        if x.mean() > 1e6:  # A condition on values, which a step that is traced cannot have.
            raise ValueError("The activations are too large.")
        np.asarray(jax.lax.stop_gradient(x))
        x = nn.BatchNorm(use_running_average=not train, axis_name="replica")(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(1, kernel_init=small_waves)(x)[:, 0]


def absolute(outputs, targets):
    if float(outputs[0]) > 1e6:
        raise ValueError("The outputs are too large.")
    return jnp.abs(outputs - np.asarray(targets))


def is_value(text):
    return "[" in text and "Traced" not in text


@pytest.mark.slow
def test_a_model_and_metrics_see_values_in_training_evaluation_and_prediction():
    shown = []

    def loss(outputs, targets):
        shown.append(str(outputs))
        return (outputs - targets) ** 2 if (outputs > -1e6).all() else outputs

    model = ff.Model(Net(), optax.sgd(0.01), loss, {"mae": absolute}, run_eagerly=True)
    history = model.fit(X, Y, batch_size=12, validation_data=(X, Y), verbose=0)
    assert np.isfinite([*history["loss"], *history["mae"], *history["val_mae"]]).all()
    assert model.evaluate(X, Y)["mae"] == pytest.approx(history["val_mae"][0], rel=1e-6)
    assert model.predict(X).shape == (12,)
    assert shown and all(map(is_value, shown))


@pytest.mark.slow
def test_what_an_eager_model_has_trained_is_used_by_a_compiled_one():
    net, y = nn.Dense(1, kernel_init=small_waves), Y[:, None]
    eager = ff.Model(net, optax.sgd(0.01), "mse", strategy=Eager(Sharded(devices=ONE.devices)))
    eager.fit(X, y, verbose=0)
    compiled = ff.Model(net, optax.sgd(0.01), "mse", strategy=ONE)
    compiled.state = eager.state
    np.testing.assert_allclose(eager.predict(X), compiled.predict(X), rtol=1e-6, atol=1e-6)
    assert eager.evaluate(X, y) == pytest.approx(compiled.evaluate(X, y), rel=1e-6)


@pytest.mark.slow
def test_a_step_of_the_users_own_sees_values():
    def step(state, batch):
        (x,), (y,) = batch.inputs, batch.targets
        error = float(((x @ state.params["w"] - y) ** 2).mean())
        return state, {"error": error if error > 0 else 0.0}

    task = ff.TrainTask(apply, optax.sgd(0.1), "mse", (X, 2 * Y), step=step)
    loop = ff.TrainLoop(init, task, 0, n_steps=1, debug=True, stdout=False)
    assert next(loop).metrics["error"] == pytest.approx(float((Y**2).mean()), rel=1e-6)


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoints(tmp_path):
    def conditional(rngs, x):
        return init(rngs, x) if x.shape[0] and not x.any() else {}

    def loop(n_steps):
        reader = CheckpointFileReader(tmp_path, conditional)
        data = ff.ArrayStream(X, Y, batch_size=8, shuffle=True)
        task = ff.TrainTask(apply, optax.sgd(0.1), "mse", data)
        with CheckpointFileWriter(tmp_path) as writer:
            options = {"n_steps": n_steps, "debug": True, "stdout": False, "callbacks": writer}
            return [*ff.TrainLoop(reader, task, 0, **options)]

    loop(1)
    assert [each.step for each in loop(3)] == [2, 3]


@pytest.mark.slow
def test_the_value_of_what_the_gradient_is_taken_through_is_explained():
    def loss(outputs, targets):
        return (outputs - targets) ** 2 + 0 * float(outputs[0])

    task = ff.TrainTask(apply, optax.sgd(0.1), loss, (X, Y))
    loop = ff.TrainLoop(init, task, 0, debug=True, stdout=False)
    with pytest.raises(TypeError, match=r"test_eager.py, line \d+.*jax.lax.stop_gradient\(array\)"):
        next(loop)


@pytest.mark.parametrize(
    "strategy", [DataParallel(), Sharded(), DataParallel(ONE.devices, virtual_replicas=2)], ids=repr
)
def test_several_devices_and_virtual_replicas_are_refused(strategy):
    with pytest.raises(ValueError, match="Cannot run eagerly on .*one device of one process"):
        ff.Model(nn.Dense(1), optax.sgd(0.1), "mse", strategy=strategy, run_eagerly=True)
    task = ff.TrainTask(apply, optax.sgd(0.1), "mse", (X, Y))
    with pytest.raises(ValueError, match="Cannot run eagerly on DataParallel.2 cpu devices"):
        ff.TrainLoop(init, task, 0, debug=True, devices=jax.devices()[:2])


@pytest.mark.slow
def test_it_is_said_once_and_that_nothing_was_compiled_is_not(capsys):
    task = ff.TrainTask(apply, optax.sgd(0.1), "mse", (X, Y))
    loop = ff.TrainLoop(init, task, 0, n_steps=2, debug=True)
    assert [*loop] and np.isnan(loop.step_flops())
    with pytest.raises(ValueError, match="or it runs eagerly"):
        loop.step_memory()
    said = capsys.readouterr().err
    assert said.count("debug mode: nothing is compiled") == 1 and "compiled the" not in said


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=["whole", "parts"])
def test_a_loss_that_looks_across_the_batch_is_refused_as_in_a_compiled_run(options):
    def centered(outputs, targets):
        return jnp.mean((outputs - outputs.mean(0) - targets) ** 2, -1)

    x, y = np.eye(6, 4, dtype=np.float32), np.ones((6, 1), np.float32)
    for is_eager in (True, False):
        model = ff.Model(nn.Dense(1), optax.sgd(0.1), centered, run_eagerly=is_eager, **options)
        with pytest.raises(ValueError, match="depends on the other examples"):
            model.fit(x, y, batch_size=4, verbose=0)
