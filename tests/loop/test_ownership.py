"""Checkpoints whose arrays lie on the host."""

import copy
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flaxfit.loop._snapshot import is_light, snapshots
from jax.sharding import SingleDeviceSharding

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


def plain(tree):
    def on_host(x):
        return np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        )

    return jax.tree.map(on_host, tree)


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


def count_copies(loop):
    n, snapshot = [], loop._snapshot
    loop._snapshot = lambda *tree: n.append(loop.step) or snapshot(*tree)
    return n


def test_a_state_is_copied_where_somebody_holds_on_to_it_and_once():
    loop = loop_with()
    copies = count_copies(loop)
    for checkpoint in loop.run(3):
        del checkpoint
    assert copies == []
    first = loop.next_checkpoint()
    del first
    second = loop.next_checkpoint()
    loop.next_step()
    assert copies == [loop.step - 1]
    assert second.state is second.with_metrics({"a": 1.0}).state
    assert copies == [loop.step - 1]


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("limit", [2**22, 0], ids=["few bytes", "many bytes"])
def test_a_state_that_is_looked_at_late_is_that_of_its_step(devices, limit, monkeypatch):
    monkeypatch.setattr("flaxfit.loop._snapshot._FEW_BYTES", limit)
    at_once, late = (loop_with(devices=jax.devices()[:devices], keep_grads=True) for _ in range(2))
    states = [plain((c.state, c.grads)) for c in at_once]
    checkpoints = list(late)
    for state, checkpoint in zip(states, checkpoints, strict=True):
        again = plain((checkpoint.state, checkpoint.grads))
        jax.tree.map(np.testing.assert_array_equal, again, state)
        leaves = jax.tree.leaves(checkpoint.state.params)
        assert {leaf.sharding for leaf in leaves} == {SingleDeviceSharding(jax.devices()[0])}


def read_in_a_trace(checkpoint):
    jax.jit(lambda x: x + checkpoint.state.params["layers_0"]["bias"][0])(1.0)
    jax.eval_shape(lambda: checkpoint.grads)


def read_in_a_mesh(checkpoint):
    with jax.set_mesh(jax.make_mesh((2,), ("model",))):
        jax.tree.leaves((checkpoint.state, checkpoint.grads))


def read_behind_a_guard(checkpoint):
    with jax.transfer_guard("disallow"):
        jax.tree.leaves((checkpoint.state, checkpoint.grads))


def pickled(checkpoint):
    return copy.deepcopy(copy.copy(checkpoint)).replace(stop=False)


@pytest.mark.parametrize("limit", [2**22, 0], ids=["few bytes", "many bytes"])
@pytest.mark.parametrize("read", [read_in_a_trace, read_in_a_mesh, read_behind_a_guard, pickled])
def test_a_state_is_whole_wherever_it_is_looked_at_first(read, limit, monkeypatch):
    monkeypatch.setattr("flaxfit.loop._snapshot._FEW_BYTES", limit)
    first, second = (loop_with(devices=jax.devices()[:1], keep_grads=True) for _ in range(2))
    expected, checkpoint = first.next_checkpoint(), second.next_checkpoint()
    checkpoint = read(checkpoint) or checkpoint
    parts = ((c.state, c.grads) for c in (checkpoint, expected))
    jax.tree.map(np.testing.assert_array_equal, *map(plain, parts))


@pytest.mark.parametrize("limit", [2**22, 0], ids=["few bytes", "many bytes"])
@pytest.mark.parametrize("where", ["device", "host"])
def test_the_state_of_a_loop_is_whole_if_a_traced_function_asks_for_it(where, limit, monkeypatch):
    monkeypatch.setattr("flaxfit.loop._snapshot._FEW_BYTES", limit)
    loop = loop_with(devices=jax.devices()[:1], snapshot=where)
    loop.next_checkpoint()
    expected = jax.tree.map(np.array, loop.state_in_place.params)
    seen = []
    jax.jit(lambda x: seen.append(plain(loop.state.params)) or x)(1.0)
    jax.tree.map(np.testing.assert_array_equal, seen[0], expected)


def test_a_state_that_could_not_be_copied_is_not_used_up():
    loop = loop_with()
    snapshot, n = loop._snapshot, []

    def fails_at_first(*tree):
        n.append(0)
        if len(n) == 1:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return snapshot(*tree)

    loop._snapshot = fails_at_first
    checkpoint = loop.next_checkpoint()
    expected = jax.tree.map(np.array, loop.state_in_place.params)
    with pytest.raises(RuntimeError, match="EXHAUSTED"):
        loop.next_step()
    assert loop.step == checkpoint.step
    assert loop.next_step().step == checkpoint.step + 1
    jax.tree.map(np.testing.assert_array_equal, plain(checkpoint.state.params), expected)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_step_in_a_mesh_copies_what_is_held(devices):
    loop = loop_with(devices=jax.devices()[:devices])
    checkpoint = loop.next_checkpoint()
    expected = jax.tree.map(np.array, loop.state_in_place.params)
    with jax.set_mesh(jax.make_mesh((2,), ("model",))):
        loop.next_step()
        state = loop.state
    assert state.step == checkpoint.step + 1
    jax.tree.map(np.testing.assert_array_equal, plain(checkpoint.state.params), expected)


def test_a_snapshot_that_is_taken_while_a_batch_is_fetched_stays_what_it_was():
    snapshots = []

    def batches():
        for i in range(9):
            if i == 4:
                snapshots.append(loop.snapshot())
            yield X[:8], Y[:8]

    loop = loop_with()
    loop.data = batches()
    steps = {checkpoint.step: plain(checkpoint.state.params) for checkpoint in loop.run(9)}
    (snapshot,) = snapshots
    assert snapshot.step == 4
    jax.tree.map(np.testing.assert_array_equal, plain(snapshot.state.params), steps[4])


def test_nothing_is_kept_track_of_but_the_latest_checkpoint():
    loop = loop_with(keep_grads=True)
    checkpoint = loop.next_checkpoint()
    kept = len(loop._stepper._kept)
    for _ in range(3):
        assert loop.state.step == 1
    assert len(loop._stepper._kept) == kept == 2
    only_grads = checkpoint.replace(state=None)
    of_state, of_grads = loop._stepper._kept
    del checkpoint
    assert of_state() is None and of_grads() is not None
    loop.next_step()
    assert plain(only_grads.grads)["layers_0"]["bias"].shape == (8,)


def test_a_handler_of_a_signal_may_look_at_a_state_that_is_just_being_copied():
    loop, seen = loop_with(devices=jax.devices()[:1]), []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(checkpoint.state))
    try:
        snapshot = loop._snapshot
        ways = [snapshot, lambda *tree: signal.raise_signal(signal.SIGUSR1) or snapshot(*tree)]
        loop._snapshot = lambda *tree: (ways.pop() if len(ways) > 1 else snapshot)(*tree)
        checkpoint = loop.next_checkpoint()
        loop._snapshot = snapshot
        state = checkpoint.state
    finally:
        signal.signal(signal.SIGUSR1, before)
    jax.tree.map(np.testing.assert_array_equal, plain(seen[0]), plain(state))


def test_numpy_copies_what_it_keeps_all_of():
    assert is_light([jnp.ones(2), jnp.ones(2, jnp.bfloat16), jnp.int32(1)])
    weak = {"w": jnp.ones(2), "rate": jnp.asarray(1.0)}
    take = snapshots("device", ff.DataParallel(jax.devices()[:1]))
    assert take(weak, True)()["rate"].weak_type
    assert is_light([jnp.ones((1024, 1024, 2))]) and not is_light([jnp.ones((1024, 1024, 3))])
    with jax.enable_x64(True):
        assert not is_light([jnp.ones(2, jnp.float64)])


KNOWN_TO_PYTHON = ["bool", "int8", "float32", "uint32", "float16", "complex64"]


@pytest.mark.parametrize("dtypes", [KNOWN_TO_PYTHON, ["int8", "bfloat16", "float32"]])
def test_what_numpy_copies_is_whole_when_the_arrays_are_gone(dtypes):
    shapes = [(), (3,), (2, 3), (0, 2)]
    draw = np.random.default_rng(0)
    tree = {
        f"{dtype}{shape}": jnp.asarray(draw.integers(0, 100, shape)).astype(dtype)
        for dtype in dtypes
        for shape in shapes
    }
    expected = jax.tree.map(np.array, tree)
    made = snapshots("device", ff.DataParallel(jax.devices()[:1]))(tree, True)
    used_up = jax.jit(lambda t: jax.tree.map(jnp.zeros_like, t), donate_argnums=0, keep_unused=True)
    jax.block_until_ready(used_up(tree))
    assert tree["int8(2, 3)"].is_deleted()
    for name, array in made().items():
        assert isinstance(array, jax.Array) and array.dtype == expected[name].dtype
        np.testing.assert_array_equal(array, expected[name])


def test_arrays_of_other_kinds_are_copied_as_what_they_are():
    # All of as many bytes, so that nothing else would tell them apart.
    trees = [
        jnp.arange(6.0).reshape(2, 3),
        jnp.arange(6.0).reshape(3, 2),
        jnp.arange(6).reshape(3, 2),
        jnp.arange(12, dtype=jnp.bfloat16),
        jnp.arange(6.0).reshape(2, 3),
    ]
    weak = jnp.full((), 2.5)
    assert weak.weak_type
    take = snapshots("device", ff.DataParallel(jax.devices()[:1]))
    for tree in [*trees, weak, trees[0]]:
        copy = take([tree], True)()[0]
        assert copy.aval == tree.aval
        np.testing.assert_array_equal(copy, tree)


def test_fit_copies_no_state_that_nobody_asks_for(monkeypatch):
    copies = []
    collect = ff.DataParallel.collect
    monkeypatch.setattr(ff.DataParallel, "collect", lambda *a: copies.append(0) or collect(*a))
    model = ff.Model(nn.Dense(1), optax.sgd(0.1), "mse")
    model.fit(X, Y, batch_size=8, epochs=3, verbose=0)
    assert copies == []
    seen = []
    model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[lambda c: seen.append(c.state)])
    assert len(copies) == 3


def test_other_places_are_refused():
    with pytest.raises(ValueError, match=r'snapshot must be "device" or "host", got .disk.'):
        loop_with(snapshot="disk")


@pytest.mark.slow
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
