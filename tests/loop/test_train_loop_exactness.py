"""A TrainLoop gives the numbers of a hand-written loop on any number of devices, and as fast."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from internals import programs_of
from loops import (
    OPTIMIZER,
    Normalized,
    Regressor,
    X,
    Y,
    assert_close,
    given,
    make_loop,
    some_devices,
)
from marks import slow, thorough

import flaxfit as ff
from flaxfit.loop._tally import Tally

pytestmark = pytest.mark.optimized

# Against a hand-written loop, and between devices.


@pytest.mark.parametrize("n_devices", [thorough(1), 4])
@pytest.mark.parametrize(
    "module", [thorough(Regressor()), thorough(Regressor(0.5)), Normalized(0.5)]
)
def test_training_equals_a_hand_written_optax_loop(module, n_devices):
    batches = [(X[i : i + 16], Y[i : i + 16]) for i in (0, 16, 32, 48)] * 2
    loop = make_loop(module, batches, devices=jax.devices()[:n_devices])
    key, n = loop.state.key, 16 // n_devices
    state = jax.device_get(loop.state.replace(key=None))
    variables, opt_state = state.variables, state.opt_state

    @jax.jit
    def update(variables, opt_state, step, x, y):
        def loss(params):
            losses, updates = [], []
            for replica in range(n_devices):
                rows = slice(replica * n, replica * n + n)
                outputs, new = module.apply(
                    {**variables, "params": params},
                    x[rows],
                    rngs={"dropout": jax.random.fold_in(ff.step_key(key, step, replica), 0)},
                    mutable=["batch_stats", "counters"],
                )
                losses.append(jnp.mean((outputs - y[rows]) ** 2))
                updates.append(new)
            mean = jax.tree.map(
                lambda a, *rest: (sum(rest, a) / n_devices).astype(a.dtype), *updates
            )
            return sum(losses) / n_devices, mean

        params = variables["params"]
        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        changes, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return {**new, "params": optax.apply_updates(params, changes)}, opt_state, value

    checkpoints = list(loop)
    for step, ((x, y), checkpoint) in enumerate(zip(batches, checkpoints, strict=True)):
        variables, opt_state, value = update(variables, opt_state, step, x, y)
        assert checkpoint.loss == pytest.approx(float(value), rel=1e-5)
    ours = checkpoints[-1].state.variables
    assert_close(ours, {name: variables[name] for name in ours}, rtol=2e-4, atol=2e-6)


def test_every_replica_holds_the_same_state_and_counters_stay_integers():
    loop = make_loop(Normalized(dropout=0.3), devices=jax.devices(), n_steps=3)
    *_, last = loop
    calls = last.model_state["counters"]["calls"]
    assert calls.dtype == jnp.int32 and int(calls) == 3
    state = loop.state_in_place
    for leaf in jax.tree.leaves(state.replace(key=jax.random.key_data(state.key))):
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(shards) == 4
        for shard in shards:
            np.testing.assert_array_equal(shard, shards[0])


# Of any number of examples: the last batch of 8 may have fewer.

ROWS = np.random.default_rng(2).normal(size=(25, 3)).astype(np.float32)
SUMS = (ROWS @ np.array([1.0, -2.0, 0.5])).astype(np.float32)
WEIGHTS = np.random.default_rng(3).uniform(0.2, 2, 25).astype(np.float32)
PARAMS = np.array([0.3, 0.1, -0.4], np.float32)


@given
def init(rngs, x):
    return {"params": jnp.asarray(PARAMS, x.dtype)}


def apply(variables, x, **_):
    return x @ variables["params"], {}


def loop_of_rows(data, **options):
    task = ff.TrainTask(apply, optax.sgd(0.1), "mse", data)
    return ff.TrainLoop(init, task, 0, stdout=False, **options)


def steps_by_hand(x, y, w, rate):
    """The loss and the parameters of each step of an epoch, in float64."""
    params = PARAMS.astype(np.float64)
    for rows in (slice(i, min(i + 8, len(x))) for i in range(0, len(x), 8)):
        w_of, x_of = w[rows].astype(np.float64), x[rows].astype(np.float64)
        errors = x_of @ params - y[rows]
        params = params - rate * (2 * w_of * errors) @ x_of / w_of.sum()
        yield np.average(errors**2, weights=w_of), params


@pytest.mark.slow
@pytest.mark.parametrize("weights", [thorough(None), WEIGHTS], ids=["equal", "weighted"])
@pytest.mark.parametrize("n_devices", some_devices(4))
def test_every_step_of_an_epoch_has_the_gradient_of_its_own_examples(n_devices, weights):
    loop = loop_of_rows([(ROWS, SUMS)], devices=jax.devices()[:n_devices])
    for n in range(1, 26):
        w = None if weights is None else weights[:n]
        loop.restore(loop.state.replace_params(PARAMS))
        # What is resident has a program for each size; the other way has one for all.
        options = {"epochs": 1, "resident": n % 5 == 0}
        loop.data = ff.ArrayStream(ROWS[:n], SUMS[:n], w, batch_size=8, **options)
        expected = steps_by_hand(ROWS[:n], SUMS[:n], np.ones(n) if w is None else w, 0.1)
        for checkpoint, (loss, params) in zip(loop.run(99), expected, strict=True):
            assert checkpoint.loss == pytest.approx(loss, rel=1e-5, abs=1e-9), n
            np.testing.assert_allclose(checkpoint.state.params, params, rtol=2e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("resident", [True, thorough(False)])
def test_whole_batches_are_trained_on_as_those_that_could_be_padded(resident):
    def losses(*data):
        stream = ff.ArrayStream(*data, batch_size=8, epochs=2, resident=resident)
        return [checkpoint.loss for checkpoint in loop_of_rows(stream)][:3]

    for weights in ((), (np.resize(np.arange(24) % 3, 25),)):
        whole, ragged = ([each[:n] for each in (ROWS, SUMS, *weights)] for n in (24, 25))
        np.testing.assert_allclose(losses(*whole), losses(*ragged), rtol=1e-6)


def test_an_epoch_with_a_remainder_compiles_once():
    loop = loop_of_rows(ff.ArrayStream(ROWS, SUMS, batch_size=8, epochs=3))
    assert len(list(loop)) == 12
    assert len(programs_of(loop)) == 1


@pytest.mark.parametrize("resident", [slow(True), False])
@pytest.mark.parametrize(
    "weights", [thorough(None, id="equal"), pytest.param(WEIGHTS, id="weighted")]
)
@pytest.mark.parametrize("n_devices", [thorough(1), 3])
def test_sixty_four_bits_are_kept_where_they_are_switched_on(n_devices, weights, resident):
    with jax.enable_x64(True):
        x, y = ROWS.astype(np.float64), SUMS.astype(np.float64)
        data = ff.ArrayStream(x, y, weights, batch_size=8, epochs=1, resident=resident)
        strategy = ff.DataParallel(jax.devices()[:n_devices])
        loop = loop_of_rows(data, strategy=strategy)
        w = np.ones(len(x)) if weights is None else weights.astype(np.float64)
        params = PARAMS
        for checkpoint, (loss, params) in zip(loop, steps_by_hand(x, y, w, 0.1), strict=True):
            assert checkpoint.loss == pytest.approx(loss, 1e-13)
            np.testing.assert_allclose(checkpoint.state.params, params, rtol=1e-13)
        measure = ff.EvalLoop(ff.EvalTask(lambda v, x: apply(v, x)[0], ["mae"]), strategy=strategy)
        state = ff.InferenceState(np.int32(0), params, {})
        expected = np.average(np.abs(x @ params - y), weights=w)
        assert measure.measure(state, data.one_epoch())["mae"] == pytest.approx(expected, 1e-13)


# Speed: what the loop must not do.


def test_nothing_is_read_back_between_checkpoints(monkeypatch):
    loop = make_loop(n_steps=40, n_steps_per_checkpoint=20, first_checkpoint=20)
    next(loop)
    array_class, reads = type(jnp.zeros(())), []
    original = array_class._value

    def counted(self):
        reads.append(self.shape)
        return original.fget(self)

    def read(*arguments):
        reads.append("totals")
        return original_read(*arguments)

    original_read = Tally.metrics
    monkeypatch.setattr(Tally, "metrics", read)
    monkeypatch.setattr(array_class, "_value", property(counted))
    loop.watchers.append(lambda step: at_step.append(len(reads)))
    at_step = []
    next(loop)
    assert at_step == [0] * 20
    assert reads == ["totals"]  # The checkpoint itself reads them.
    float(jnp.zeros(()))
    assert len(reads) == 2  # The count works.


@pytest.mark.slow
def test_a_long_run_over_several_devices_does_not_abort():
    loop = make_loop(n_steps=400, n_steps_per_checkpoint=399, devices=jax.devices())
    assert [c.step for c in loop] == [1, 400]


def test_the_running_metrics_can_be_read_at_any_step():
    loop, seen = make_loop(n_steps=4, n_steps_per_checkpoint=4, first_checkpoint=4), []
    loop.watchers.append(lambda step: seen.append(loop.running_metrics()["loss"]))
    (checkpoint,) = loop
    assert len(seen) == 4 and seen[-1] == checkpoint.loss
    assert loop.running_metrics() == {}
