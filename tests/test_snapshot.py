"""Checkpoints whose arrays lie on the host."""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import flaxfit as ff
from flaxfit.checkpoints import CheckpointFileWriter, restore

rng = np.random.default_rng(0)
X = rng.normal(size=(32, 8)).astype(np.float32)
Y = X.sum(1, keepdims=True)
STRATEGIES = {
    "one device": lambda: ff.DataParallel(jax.devices()[:1]),
    "data parallel": ff.DataParallel,
    "fsdp": ff.Sharded.fsdp,
}


def loop_with(strategy=None, **options):
    model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dropout(0.5, deterministic=False), nn.Dense(1)])
    data = ff.ArrayStream(X, Y, batch_size=8, shuffle=True)
    task = ff.TrainTask(model.apply, optax.adam(0.1), "mse", data)
    return ff.TrainLoop(model.init, task, 0, None, 3, 9, strategy=strategy, stdout=False, **options)


def plain(state):
    return jax.tree.map(np.asarray, state.replace(key=jax.random.key_data(state.key)))


@pytest.mark.parametrize(
    "strategy",
    [
        "one device",
        pytest.param("data parallel", marks=pytest.mark.slow),
        pytest.param("fsdp", marks=pytest.mark.slow),
    ],
)
def test_they_hold_the_numbers_that_those_on_the_devices_hold(strategy):
    on_host = list(loop_with(STRATEGIES[strategy](), snapshot="host", keep_grads=True))
    on_device = list(loop_with(STRATEGIES[strategy](), keep_grads=True))
    for host, device in zip(on_host, on_device, strict=True):
        leaves = jax.tree.leaves((host.state.replace(key=()), host.grads))
        assert {type(leaf) for leaf in leaves} == {np.ndarray}
        jax.tree.map(np.testing.assert_array_equal, plain(host.state), plain(device.state))
        jax.tree.map(np.testing.assert_array_equal, host.grads, jax.device_get(device.grads))


def test_a_loop_goes_on_from_one_and_from_its_file(tmp_path):
    loop = loop_with(snapshot="host")
    first = loop.next_checkpoint()
    with CheckpointFileWriter(tmp_path) as writer:
        writer(first)
    *_, last = loop
    loop.restore(first)
    *_, again = loop
    jax.tree.map(np.testing.assert_array_equal, plain(again.state), plain(last.state))
    saved = restore(tmp_path, last.state)
    jax.tree.map(np.testing.assert_array_equal, plain(saved), plain(first.state))


def test_other_places_are_refused():
    with pytest.raises(ValueError, match=r'snapshot must be "device" or "host", got .disk.'):
        loop_with(snapshot="disk")


def test_a_model_is_trained_with_checkpoints_on_the_host(tmp_path):
    def trained(**options):
        model = ff.Model(nn.Dense(1), optax.adam(0.1), "mse", **options)
        seen = []
        callbacks = [ff.callbacks.EarlyStopping(patience=2), lambda c: seen.append(c.state.params)]
        data = {"validation_data": (X[:9], Y[:9]), "checkpoint_dir": tmp_path / str(options)}
        history = model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks, **data)
        return dict(history), model.predict(X), {type(x) for x in jax.tree.leaves(seen)}

    host, device = trained(snapshot="host"), trained()
    assert host[0] == device[0]
    np.testing.assert_array_equal(host[1], device[1])
    assert host[2] == {np.ndarray} != device[2]
    with pytest.raises(ValueError, match="snapshot must be"):
        trained(snapshot="disk")
