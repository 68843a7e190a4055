"""The optimizers inside a TrainLoop on four devices, and across a restart from disk."""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from loops import assert_close, init_of
from marks import thorough
from sklearn.datasets import load_digits

import flaxfit as ff
from flaxfit.optim import MultiOptimizer, OptimizerDef, hyperparams, set_hyperparams

IMAGES, LABELS = load_digits(return_X_y=True)
DATA = ((IMAGES[:256] / 16).astype(np.float32), LABELS[:256].astype(np.int32))
MODEL = nn.Sequential((nn.Dense(8), nn.relu, nn.Dense(10)))
INIT = init_of(MODEL, 64)


def two_groups():
    """A stem by momentum with a schedule, a head by Adam; biases of the stem left alone."""
    rate = optax.linear_schedule(0.2, 0.0, 20)
    return MultiOptimizer(
        ("layers_0/kernel", OptimizerDef(optax.sgd, learning_rate=rate, momentum=0.9)),
        ("layers_2/.*", OptimizerDef(optax.adam, learning_rate=0.01)),
    )


def loop_with(optimizer, init=INIT, apply=MODEL.apply, **options):
    """A quiet loop over 64 digits at a time, in order."""
    stream = ff.ArrayStream(*DATA, batch_size=64, shuffle=True)
    task = ff.TrainTask(apply, optimizer, "crossentropy", stream)
    options = {"devices": jax.devices()[:1], "stdout": False, **options}
    return ff.TrainLoop(init, task, 0, n_steps_per_checkpoint=3, **options)


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", [thorough(1), 4])
def test_a_loop_trains_the_groups_as_one_device_by_hand_does(n_devices):
    loop = loop_with(two_groups(), devices=jax.devices()[:n_devices])
    start = loop.state
    optimizer = two_groups().create(start.params)
    stream = ff.ArrayStream(*DATA, batch_size=64, shuffle=True)

    @jax.jit
    def step(optimizer, x, y):
        def loss_fn(params):
            logits = MODEL.apply({"params": params}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        return optimizer.apply_gradient(optimizer.compute_gradient(loss_fn)[2])

    for _, (x, y) in zip(range(4), stream, strict=False):
        optimizer = step(optimizer, x, y)
    checkpoint = [*loop.run_until(4)][-1]
    trained = checkpoint.model_params
    assert_close(trained, optimizer.target, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(trained["layers_0"]["bias"], start.params["layers_0"]["bias"])
    rates = hyperparams(checkpoint.optimizer_state)
    np.testing.assert_allclose(rates["layers_0/kernel"]["learning_rate"], 0.2 * (1 - 3 / 20))


@pytest.mark.slow
def test_an_nnx_model_trains_by_groups():
    model = nnx.Sequential(nnx.Linear(64, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 10, rngs=nnx.Rngs(1)))
    functions = ff.modules.from_nnx(model)
    optimizer = MultiOptimizer(("layers/1/.*", OptimizerDef(optax.sgd, learning_rate=0.1)))
    loop = loop_with(optimizer, functions.init, functions.apply)
    before = loop.state.params["layers"]
    after = loop.next_step().model_params["layers"]
    np.testing.assert_array_equal(after["0"]["kernel"], before["0"]["kernel"])
    assert np.any(after["1"]["kernel"] != before["1"]["kernel"])


@pytest.mark.slow
def test_a_run_that_is_resumed_from_disk_keeps_overrides_and_ends_bit_for_bit(tmp_path):
    def with_override(loop):
        """Three steps, then another learning rate for the stem."""
        checkpoint = [*loop.run_until(3)][-1]
        changed = set_hyperparams(checkpoint.optimizer_state, group=0, learning_rate=0.5)
        loop.restore(checkpoint.replace(state=checkpoint.state.replace(opt_state=changed)))
        return loop

    straight = with_override(loop_with(two_groups()))
    expected = [*straight.run_until(8)][-1].state
    with ff.checkpoints.CheckpointFileWriter(tmp_path) as writer:
        interrupted = with_override(loop_with(two_groups(), callbacks=[writer]))
        list(interrupted.run_until(5))
    resumed = loop_with(two_groups(), ff.checkpoints.CheckpointFileReader(tmp_path, INIT))
    assert resumed.step == 5
    rates = hyperparams(resumed.state.opt_state)
    assert float(rates["layers_0/kernel"]["learning_rate"]) == 0.5
    state = [*resumed.run_until(8)][-1].state
    jax.tree.map(
        np.testing.assert_array_equal,
        (state.params, state.opt_state),
        (expected.params, expected.opt_state),
    )
    cleared = set_hyperparams(state.opt_state, group=0, learning_rate=None)
    resumed.restore(state.replace(opt_state=cleared))
    rates = hyperparams(resumed.next_step().optimizer_state, 0)
    np.testing.assert_allclose(rates["learning_rate"], 0.2 * (1 - 8 / 20), rtol=1e-6)
