"""Who owns the arrays of a checkpoint: the loop, or a copy on the devices or on the host."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import SingleDeviceSharding
from loops import assert_equal, init_of, make_weight_loop
from marks import thorough, usual
from strategies import strategies

import flaxfit as ff
from flaxfit.callbacks import every
from flaxfit.checkpoints import CheckpointFileWriter, restore

rng = np.random.default_rng(0)
X = rng.normal(size=(32, 8)).astype(np.float32)
Y = X.sum(1, keepdims=True)
STRATEGIES = strategies(4)
MODEL = nn.Sequential((nn.Dense(8), nn.relu, nn.Dropout(0.5, deterministic=False), nn.Dense(1)))


def loop_with(strategy=None, **options):
    data = ff.ArrayStream(X, Y, batch_size=8, shuffle=True)
    task = ff.TrainTask(MODEL.apply, optax.adam(0.1), "mse", data)
    init = init_of(MODEL, 8)
    return ff.TrainLoop(init, task, 0, None, 3, 9, strategy=strategy, stdout=False, **options)


def plain(tree):
    def on_host(x):
        return np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        )

    return jax.tree.map(on_host, tree)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", usual("data-parallel", of=STRATEGIES))
def test_they_hold_the_numbers_that_those_on_the_devices_hold(strategy):
    on_host = list(loop_with(STRATEGIES[strategy](), snapshot="host", keep_grads=True))
    on_device = list(loop_with(STRATEGIES[strategy](), keep_grads=True))
    for host, device in zip(on_host, on_device, strict=True):
        leaves = jax.tree.leaves((host.state.replace(key=()), host.grads))
        assert {type(leaf) for leaf in leaves} == {np.ndarray}
        assert_equal(host.state, device.state)
        assert_equal(host.grads, device.grads)


@pytest.mark.slow
def test_a_loop_goes_on_from_one_and_from_its_file(tmp_path):
    loop = loop_with(snapshot="host")
    first = loop.next_checkpoint()
    with CheckpointFileWriter(tmp_path) as writer:
        writer(first)
    *_, last = loop
    loop.restore(first)
    *_, again = loop
    assert_equal(plain(again.state), plain(last.state))
    saved = restore(tmp_path, last.state)
    assert_equal(plain(saved), plain(first.state))


@pytest.fixture
def copies(monkeypatch):
    """Counts the copies that `DataParallel` makes."""
    counted, collect = [], ff.DataParallel.collect
    monkeypatch.setattr(ff.DataParallel, "collect", lambda *a: counted.append(0) or collect(*a))
    return counted


class Reads:
    borrows = True

    def __call__(self, checkpoint):
        float(jax.tree.leaves(checkpoint.state.params)[0][0])


@pytest.mark.slow
def test_a_checkpoint_is_copied_once_for_all_who_do_not_borrow(copies):
    loop = loop_with(callbacks=[Reads(), lambda c: None, every(1, lambda c: None)])
    list(loop)
    assert len(copies) == 4


@pytest.mark.parametrize("wrapped", [thorough(Reads()), every(1, Reads())])
def test_a_checkpoint_that_is_only_borrowed_is_not_copied(wrapped, copies):
    options = {"n_steps_per_checkpoint": 3, "devices": jax.devices()[:1]}
    loop = make_weight_loop([wrapped], **options)
    assert [c.is_borrowed for c in loop.run_until(9, copy=False)] == [True] * 4
    assert copies == []


@pytest.mark.slow
def test_what_is_borrowed_can_be_read_until_the_next_step():
    loop = loop_with(snapshot="none", keep_grads=True)
    checkpoint = loop.next_checkpoint()
    expected = plain(loop.state)
    assert_equal(plain(checkpoint.state), expected)
    kept = checkpoint.with_metrics({"a": 1.0})
    loop.next_step()
    for read in (lambda: checkpoint.state, lambda: kept.state, lambda: kept.grads):
        with pytest.raises(RuntimeError, match=r"donated to a later .* loop.owned\(checkpoint\)"):
            read()
    assert "params" not in repr(checkpoint) and checkpoint.loss


def test_a_borrowed_checkpoint_can_be_copied_by_hand():
    loop = loop_with()
    (borrowed,) = loop.run_until(1, copy=False)
    checkpoint, expected = loop.owned(borrowed), plain(loop.state)
    loop.next_step()
    assert borrowed.is_borrowed and not checkpoint.is_borrowed
    pickled = copy.deepcopy(copy.copy(checkpoint)).replace(stop=False)
    assert_equal([plain(each.state) for each in (checkpoint, pickled)], [expected] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("snapshot", [thorough("device"), "none"])
def test_callbacks_of_the_library_that_keep_weights_copy_them(snapshot, tmp_path):
    worse = iter([0.5, 1.0, 2.0, 3.0])
    stopping = ff.callbacks.EarlyStopping("worse", mode="min", patience=9)
    loop = loop_with(
        snapshot=snapshot,
        callbacks=[
            lambda c: c.with_metrics({"worse": next(worse)}),
            ff.callbacks.Rollback(),
            stopping,
            CheckpointFileWriter(tmp_path, keep=9),
        ],
    )
    states = {c.step: jax.tree.map(np.array, plain(c.state)) for c in loop.run_until(9, copy=False)}
    loop.close()  # Which puts the best weights back.
    for step, state in states.items():
        saved = restore(tmp_path, loop.state, which=step)
        assert_equal(plain(saved), state)
    assert_equal(plain(loop.state.params), states[1].params)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [thorough(1), 4])
def test_checkpoints_stay_those_of_their_steps(devices):
    at_once, late = (loop_with(devices=jax.devices()[:devices], keep_grads=True) for _ in range(2))
    states = [plain((c.state, c.grads)) for c in at_once]
    for state, checkpoint in zip(states, list(late), strict=True):
        again = plain((checkpoint.state, checkpoint.grads))
        assert_equal(again, state)
        leaves = jax.tree.leaves(checkpoint.state.params)
        assert {leaf.sharding for leaf in leaves} == {SingleDeviceSharding(jax.devices()[0])}


def test_a_state_is_whole_wherever_it_is_looked_at_first():
    options = {"devices": jax.devices()[:1], "keep_grads": True}
    expected, found = (list(make_weight_loop(**options)) for _ in range(2))
    jax.jit(lambda x: x + found[0].state.params[0] + found[0].grads[0])(1.0)
    with jax.set_mesh(jax.make_mesh((2,), ("model",))):
        jax.tree.leaves((found[1].state, found[1].grads))
    with jax.transfer_guard("disallow"):
        jax.tree.leaves((found[2].state, found[2].grads))
    for one, other in zip(found, expected, strict=True):
        assert_equal((one.state, one.grads), (other.state, other.grads))


@pytest.mark.slow
@pytest.mark.parametrize("where", [thorough("device"), "host"])
def test_the_state_of_a_loop_is_whole_if_a_traced_function_asks_for_it(where):
    loop = loop_with(devices=jax.devices()[:1], snapshot=where)
    loop.next_checkpoint()
    expected = jax.tree.map(np.array, loop.state_in_place.params)
    seen = []
    jax.jit(lambda x: seen.append(plain(loop.state.params)) or x)(1.0)
    assert_equal(seen[0], expected)


@pytest.mark.parametrize("devices", [thorough(1), 4])
def test_a_step_in_a_mesh_copies_what_is_held(devices):
    loop = loop_with(devices=jax.devices()[:devices])
    checkpoint = loop.next_checkpoint()
    expected = jax.tree.map(np.array, loop.state_in_place.params)
    with jax.set_mesh(jax.make_mesh((2,), ("model",))):
        loop.next_step()
        state = loop.state
    assert state.step == checkpoint.step + 1
    assert_equal(plain(checkpoint.state.params), expected)


@pytest.mark.slow
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
    assert_equal(plain(snapshot.state.params), steps[4])


@pytest.mark.slow
def test_fit_copies_no_state_that_nobody_keeps(copies):
    model = ff.Model(nn.Dense(1), optax.sgd(0.1), "mse")
    model.fit(X, Y, batch_size=8, epochs=3, verbose=0, validation_data=(X, Y))
    assert copies == []
    seen = []
    model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[lambda c: seen.append(c.state)])
    assert len(copies) == 3


def test_other_places_are_refused():
    with pytest.raises(ValueError, match=r'"host" or "none", got .disk.'):
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
