"""What TrainLoop promises: when it yields, what it counts, and that nothing is ever lost."""

import gc
import itertools
import shutil
import signal
import threading
import weakref
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from redex import combinator

import flaxfit as ff
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter

rng = np.random.default_rng(0)
X = rng.normal(size=(64, 5)).astype(np.float32)
Y = X.sum(1)
OPTIMIZER = optax.adamw(1e-2, weight_decay=0.1)


class Regressor(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8)(x))
        x = nn.Dropout(self.dropout, deterministic=self.dropout == 0)(x)
        return nn.Dense(1)(x)[:, 0]


class Normalized(nn.Module):
    """BatchNorm, dropout, and a counter that a mean over replicas would spoil."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, x):
        count = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            count.value += 1
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(8, use_bias=False)(x))
        x = nn.Dropout(self.dropout, deterministic=self.dropout == 0)(nn.relu(x))
        return nn.Dense(1)(x)[:, 0]


def make_task(module=None, data=None, optimizer=None, **options):
    module = module or Regressor()
    if data is None:
        data = ff.ArrayStream(X, Y, batch_size=16, shuffle=True)
    options = {"metrics": ["mae"], **options}
    return ff.TrainTask(module.apply, optimizer or OPTIMIZER, "mse", data, **options)


def make_loop(module=None, data=None, *, optimizer=None, task=None, **options):
    module = module or Regressor()
    task = task or make_task(module, data, optimizer)
    options = {"rnkey": 0, "devices": jax.devices()[:1], "stdout": False, **options}
    return ff.TrainLoop(module.init, task, **options)


def assert_equal(a, b):
    """That two trees are the same bit for bit, random keys included."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


# When it yields.


def test_checkpoints_come_at_step_1_then_every_n_and_at_the_last_step():
    checkpoints = list(make_loop(n_steps=10, n_steps_per_checkpoint=5))
    assert [c.step for c in checkpoints] == [1, 6, 10]
    assert [c.n_completed_steps for c in checkpoints] == [1, 5, 4]


def test_first_checkpoint_moves_the_grid_to_multiples_of_n():
    loop = make_loop(n_steps=11, n_steps_per_checkpoint=4, first_checkpoint=4)
    assert [c.step for c in loop] == [4, 8, 11]


def test_a_last_step_on_the_grid_is_yielded_once():
    assert [c.step for c in make_loop(n_steps=6, n_steps_per_checkpoint=5)] == [1, 6]


def test_a_run_that_begins_in_the_middle_keeps_the_grid():
    state = make_loop(n_steps=7).state.replace_step(7)
    loop = ff.TrainLoop(state, make_task(), n_steps=12, n_steps_per_checkpoint=5, stdout=False)
    assert [(c.step, c.n_completed_steps) for c in loop] == [(11, 4), (12, 1)]


def test_next_next_checkpoint_and_next_step_never_rewrite_n_steps():
    loop = make_loop(n_steps=7, n_steps_per_checkpoint=5)
    steps = [next(loop).step, loop.next_step().step, loop.next_checkpoint().step]
    assert steps == [1, 2, 6]
    assert loop.next_checkpoint().step == 7  # It lies ahead, so it is not passed over.
    assert [loop.next_checkpoint().step, loop.next_step().step] == [11, 12]
    assert loop.n_steps == 7
    with pytest.raises(StopIteration):
        next(loop)


def test_run_trains_so_many_steps_more_and_run_until_up_to_a_step():
    loop = make_loop(n_steps=5, n_steps_per_checkpoint=4)
    assert [c.step for c in loop.run(7)] == [1, 5, 7]
    assert [c.step for c in loop.run_until(10)] == [9, 10]
    assert [c.step for c in loop.run(2)] == [12]
    assert loop.n_steps == 5


def test_steps_that_are_reached_already_are_said_to_be(capsys):
    loop = make_loop(n_steps=3, n_steps_per_checkpoint=3, stdout=True)
    assert [c.step for c in loop] == [1, 3]
    assert list(loop.run_until(2)) == []
    assert "step 2 is already reached (at step 3)" in capsys.readouterr().err
    again = ff.TrainLoop(loop.state, make_task(), n_steps=3)
    assert list(again) == []
    assert "step 3 is already reached (at step 3)" in capsys.readouterr().err


def test_silence_on_request(capsys):
    list(make_loop(n_steps=2))
    assert capsys.readouterr() == ("", "")


def test_n_steps_and_the_spacing_can_be_set_while_iterating():
    loop, steps = make_loop(n_steps=100, n_steps_per_checkpoint=10), []
    for checkpoint in loop:
        steps.append(checkpoint.step)
        if checkpoint.step == 11:
            loop.n_steps_per_checkpoint = 2
        if checkpoint.step == 15:
            loop.n_steps = 16
    assert steps == [1, 11, 13, 15, 16]


def test_a_setting_changed_by_a_watcher_takes_effect_at_that_step():
    loop = make_loop(n_steps=100, n_steps_per_checkpoint=50, first_checkpoint=50)

    def stop_early(step):
        if step == 7:
            loop.n_steps = 7

    loop.watchers.append(stop_early)
    assert [c.step for c in loop] == [7]


def test_a_second_iterator_continues_the_same_run():
    loop = make_loop(n_steps=4)
    first, second = iter(loop), iter(loop)
    assert [next(first).step, next(second).step, next(first).step, next(second).step] == [
        1,
        2,
        3,
        4,
    ]
    assert loop.step == int(loop.state.step) == 4


@pytest.mark.parametrize("name", ["n_steps_per_checkpoint", "first_checkpoint", "steps_per_call"])
def test_a_spacing_of_zero_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be 1 or more, got 0"):
        make_loop(**{name: 0})


def test_steps_per_call_is_a_number_or_auto():
    with pytest.raises(TypeError, match="must be a whole number or 'auto', got 'fast'"):
        make_loop(steps_per_call="fast")


# The data.


def test_finite_data_ends_with_a_last_checkpoint_and_named_errors_after():
    data = [(X[:16], Y[:16])] * 6
    loop = make_loop(data=data, n_steps=100, n_steps_per_checkpoint=4)
    assert [(c.step, c.n_completed_steps) for c in loop] == [(1, 1), (5, 4), (6, 1)]
    assert list(loop) == []
    for method in (loop.next_step, loop.next_checkpoint):
        with pytest.raises(ff.EndOfData, match="ended after step 6"):
            method()


def test_data_that_ends_on_the_grid_gives_no_second_checkpoint():
    loop = make_loop(data=[(X[:16], Y[:16])] * 5, n_steps_per_checkpoint=4)
    assert [c.step for c in loop] == [1, 5]


def test_other_data_can_be_trained_on_next():
    loop = make_loop(data=[(X[:16], Y[:16])] * 2)
    assert [c.step for c in loop] == [1, 2]
    loop.data = [(X[16:32], Y[16:32])] * 2
    assert [c.step for c in loop] == [3, 4]


@pytest.mark.parametrize(("at", "ends"), [(0, False), (1, False), (1, True), (3, False), (3, True)])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_data_that_is_set_while_a_batch_is_read_is_gone_on_with(at, ends, steps_per_call):
    other = [(X[16:32], Y[16:32])] * 2

    def batches():
        for i in range(5):
            if i == at:
                loop.data = other
                if ends:
                    return
            yield X[:16], Y[:16]

    options = {"n_steps_per_checkpoint": 9, "first_checkpoint": 9, "steps_per_call": steps_per_call}
    loop = make_loop(data=[(X[:16], Y[:16])], **options)
    loop.data = batches()
    *_, last = loop
    before = at - at % steps_per_call  # What was read along with it is not stepped, either.
    assert last.step == before + len(other)


def test_the_batch_that_was_peeked_at_is_trained_on():
    seen = []

    def batches():
        for i in range(3):
            seen.append(i)
            yield X[i * 16 : i * 16 + 16], Y[i * 16 : i * 16 + 16]

    loop = make_loop(data=batches())
    assert seen == [0]
    *_, last = loop
    expected = make_loop(data=[(X[i : i + 16], Y[i : i + 16]) for i in (0, 16, 32)])
    *_, other = expected
    assert last.step == 3
    assert_equal(last.state.params, other.state.params)


def test_empty_data_is_refused():
    with pytest.raises(ValueError, match="no batches|is empty"):
        make_loop(data=[])


def test_a_stream_that_broke_is_not_taken_for_its_end():
    def batches():
        yield X[:16], Y[:16]
        raise OSError("disk gone")

    loop = make_loop(data=batches())
    assert next(loop).step == 1
    with pytest.raises(OSError, match="disk gone"):
        next(loop)
    with pytest.raises(RuntimeError, match="disk gone"):
        next(loop)


@pytest.mark.parametrize("form", ["list", "dict", "weights", "named", "jax"])
def test_batches_come_in_many_forms(form):
    x, y = X[:16], Y[:16]
    forms = {
        "list": [x, y],
        "dict": {"x": x, "y": y},
        "weights": (x, y, np.ones(16, np.float32)),
        "named": ({"x": x}, y),
        "jax": (jnp.asarray(x), jnp.asarray(y)),
    }
    expected = make_loop(data=[(x, y)]).next_step()
    checkpoint = make_loop(data=[forms[form]]).next_step()
    assert checkpoint.loss == pytest.approx(expected.loss, rel=1e-6)


def test_a_change_of_shape_is_announced_and_of_structure_refused(capsys):
    data = [(X[:8], Y[:8]), (X[:16], Y[:16]), ((X[:16], X[:16]), Y[:16])]
    loop = make_loop(data=data, stdout=True)
    assert [next(loop).step, next(loop).step] == [1, 2]
    assert "compiled the training step again" in capsys.readouterr().err
    with pytest.raises(ValueError) as caught:
        next(loop)
    assert "another structure than the first one" in str(caught.value)
    first, now = (str(X[:8].shape), str(Y[:8].shape)), f"(({X[:16].shape}, {X[:16].shape})"
    assert f"\n  first inputs ({first[0]},), targets ({first[1]},)" in str(caught.value)
    assert "\n  now   inputs ((" in str(caught.value) and now[1:-1] in str(caught.value)


# What a checkpoint holds.


def test_the_loss_is_the_mean_over_the_examples_since_the_previous_checkpoint():
    frozen = optax.adam(0.0)
    data = [(X[:16], Y[:16]), (X[16:32], Y[16:32]), (X[32:37], Y[32:37])]
    loop = make_loop(data=data, optimizer=frozen, n_steps_per_checkpoint=2)
    first, second = loop
    outputs = np.asarray(Regressor().apply({"params": first.state.params}, X))
    errors = outputs - Y
    assert first.loss == pytest.approx(np.mean(errors[:16] ** 2), rel=1e-6)
    assert second.loss == pytest.approx(np.mean(errors[16:37] ** 2), rel=1e-6)
    assert second.metrics["mae"] == pytest.approx(np.mean(np.abs(errors[16:37])), rel=1e-6)
    assert all(type(value) is float for value in second.metrics.values())


def test_every_kept_checkpoint_stays_readable():
    checkpoints = list(make_loop(n_steps=5, devices=jax.devices()))
    sums = [
        float(jax.tree.reduce(jnp.add, jax.tree.map(jnp.sum, c.state.params))) for c in checkpoints
    ]
    assert len(set(sums)) == 5
    assert [int(c.optimizer_state[0].count) for c in checkpoints] == [1, 2, 3, 4, 5]
    assert all(
        x.shape == y.shape
        for x, y in zip(
            jax.tree.leaves(checkpoints[0].model_params),
            jax.tree.leaves(make_loop().state.params),
            strict=True,
        )
    )


def test_the_users_own_state_survives_training():
    state = make_loop().state
    before = make_loop().state
    list(ff.TrainLoop(state, make_task(), n_steps=3, stdout=False))
    assert_equal(state, before)


def test_gradients_are_kept_on_request():
    loop = make_loop(data=[(X, Y)], keep_grads=True)
    params = loop.state.params

    def loss(params):
        outputs: Any = Regressor().apply({"params": params}, X)
        return jnp.mean((outputs - Y) ** 2)

    checkpoint = loop.next_step()
    expected = jax.device_get(jax.jit(jax.grad(loss))(params))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        checkpoint.grads,
        expected,
    )
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(expected)))
    assert checkpoint.metrics["grad_norm"] == pytest.approx(norm, 1e-5)
    with pytest.raises(ValueError, match="keep_grads=True"):
        _ = make_loop().next_step().grads


def test_the_norm_of_the_gradients_can_be_left_out():
    assert "grad_norm" not in make_loop(grad_norm=False).next_step().metrics


def test_compile_time_is_told_apart_from_training_time():
    first, second = make_loop(n_steps=2)
    assert first.compile_time > 0 and first.elapsed_time > 0
    assert second.compile_time == 0 and second.elapsed_time > 0


# Callbacks.


def test_callbacks_run_in_order_and_may_replace_the_checkpoint():
    def add(checkpoint):
        return checkpoint.with_metrics({"extra": 1.0})

    seen = []
    loop = make_loop(callbacks=[add, lambda c: seen.append(c.metrics["extra"])])
    assert loop.next_step().metrics["extra"] == 1.0 and seen == [1.0]


def test_a_callback_can_stop_the_loop():
    loop = make_loop(n_steps=100, callbacks=lambda c: c.replace(stop=c.step == 3))
    assert [c.step for c in loop] == [1, 2, 3]
    assert list(loop) == []


def test_callbacks_compose_with_redex():
    def add(checkpoint: ff.Checkpoint) -> ff.Checkpoint:
        return checkpoint.with_metrics({"extra": 1.0})

    def double(checkpoint: ff.Checkpoint) -> ff.Checkpoint:
        return checkpoint.with_metrics({"twice": 2 * checkpoint.metrics["extra"]})

    assert make_loop(callbacks=combinator.serial(add, double)).next_step().metrics["twice"] == 2.0


def test_callbacks_are_attached_once_and_closed_when_training_ends():
    class Watcher:
        def __init__(self):
            self.events = []

        def attach(self, loop):
            self.events.append("attach")

        def __call__(self, checkpoint):
            self.events.append(checkpoint.step)

        def close(self):
            self.events.append("close")

    watcher = Watcher()
    list(make_loop(n_steps=2, callbacks=[watcher]))
    assert watcher.events == ["attach", 1, 2, "close"]
    watcher = Watcher()
    with pytest.raises(KeyError), make_loop(callbacks=[watcher]) as loop:
        next(loop)
        raise KeyError
    assert watcher.events == ["attach", 1, "close"]


# Starting.


def test_a_fresh_start_needs_a_key():
    with pytest.raises(ValueError, match="needs a random key"):
        make_loop(rnkey=None)


def test_a_given_state_needs_no_key():
    loop = ff.TrainLoop(make_loop().state, make_task(), stdout=False)
    assert loop.next_step().step == 1


@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3), 3])
def test_a_key_is_typed_or_raw_or_a_seed(key):
    expected = make_loop(rnkey=jax.random.key(3)).next_step()
    assert make_loop(rnkey=key).next_step().loss == expected.loss


def test_an_input_sample_stands_in_for_the_first_batch():
    def batches():
        yield pytest.fail("the data was read")

    loop = make_loop(data=batches(), input_sample=X[:2])
    assert loop.step == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": ff.DataParallel()}, "either devices or a strategy"),
        ({"task": make_task(rngs=("noise",)), "collections": ["dropout"]}, "either collections or"),
        ({"task": make_task(mutable=False), "mutable_collections": ["a"]}, "either mutable_coll"),
    ],
)
def test_arguments_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_loop(**options)


def test_the_ancestors_arguments_become_fields_of_the_task():
    loop = make_loop(
        collections={"init": ["params"], "apply": ["noise"]}, mutable_collections=False
    )
    assert loop.task.rngs == ("noise",) and loop.task.mutable is False


def test_a_module_in_place_of_its_init_is_refused():
    with pytest.raises(TypeError, match=r"pass module\.init"):
        ff.TrainLoop(Regressor(), make_task(), 0)


def test_a_reader_is_asked_for_a_checkpoint_and_a_fresh_start_said(capsys):
    class Reader:
        target = staticmethod(Regressor().init)

        def __init__(self, found=None):
            self.found = found

        def read(self, template):
            self.template = template
            return self.found

    reader = Reader()
    loop = ff.TrainLoop(reader, make_task(), 0)
    assert "starting fresh" in capsys.readouterr().err
    assert jax.tree.map(jnp.shape, reader.template.params) == jax.tree.map(
        jnp.shape, loop.state.params
    )
    with pytest.raises(ValueError, match="needs a random key"):
        ff.TrainLoop(reader, make_task())


def test_a_run_is_resumed_from_its_checkpoint_files(tmp_path, capsys):
    def make(**options):
        module = Normalized(dropout=0.3)
        reader = CheckpointFileReader(tmp_path / "run", module.init)
        with ff.TrainLoop(
            reader, make_task(module), 0, n_steps_per_checkpoint=4, **options
        ) as loop:
            return list(loop)

    writer = CheckpointFileWriter(tmp_path / "run")
    make(n_steps=6, callbacks=[writer])
    assert "starting fresh" in capsys.readouterr().err
    *_, resumed = make(n_steps=12)
    assert "restored step 6" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run")
    *_, whole = make(n_steps=12)
    assert (resumed.step, resumed.n_completed_steps) == (12, whole.n_completed_steps)
    assert_equal(resumed.state, whole.state)


# Randomness and resuming.


@pytest.mark.parametrize("n_devices", [1, 4])
def test_a_run_in_two_parts_equals_the_whole_bit_for_bit(n_devices):
    def make(**options):
        return make_loop(
            Normalized(dropout=0.3),
            n_steps=9,
            devices=jax.devices()[:n_devices],
            n_steps_per_checkpoint=4,
            **options,
        )

    *_, whole = make()
    first = make()
    next(first)
    half = next(first)
    second = make(rnkey=99)
    second.restore(half)
    *_, resumed = second
    assert (half.step, resumed.step) == (5, 9)
    assert_equal(
        [whole.state.params, whole.state.opt_state, whole.model_state],
        [resumed.state.params, resumed.state.opt_state, resumed.model_state],
    )
    assert resumed.metrics == whole.metrics


def test_the_key_of_a_step_can_be_derived_outside():
    state = make_loop().state
    expected = jax.random.fold_in(jax.random.fold_in(state.key, 5), 2)
    assert ff.step_key(state.key, 5, 2) == expected


@pytest.mark.parametrize("steps_per_call", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_several_steps_in_one_dispatch_change_nothing(steps_per_call):
    options = {"n_steps": 10, "n_steps_per_checkpoint": 4}
    one = list(make_loop(Regressor(0.2), **options))
    many = list(make_loop(Regressor(0.2), steps_per_call=steps_per_call, **options))
    assert [c.step for c in many] == [c.step for c in one] == [1, 5, 9, 10]
    assert_equal([c.state.params for c in one], [c.state.params for c in many])


def test_several_steps_in_one_dispatch_over_several_devices():
    options = {"n_steps": 9, "n_steps_per_checkpoint": 4, "devices": jax.devices()}
    *_, one = make_loop(**options)
    *_, many = make_loop(steps_per_call=4, **options)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
        one.state.params,
        many.state.params,
    )


@pytest.mark.parametrize(("first", "spacing"), [(6, 6), (1, 7)])
@pytest.mark.parametrize("n_examples", [pytest.param(64, marks=pytest.mark.slow), 50])
@pytest.mark.parametrize("has_weights", [pytest.param(False, marks=pytest.mark.slow), True])
def test_several_steps_in_one_dispatch_reach_over_the_end_of_an_epoch(
    n_examples, has_weights, first, spacing
):
    def run(steps_per_call):
        w = (np.arange(n_examples, dtype=np.float32) % 3,) if has_weights else ()
        parts = X[:n_examples], Y[:n_examples], *w
        data = ff.ArrayStream(*parts, batch_size=16, shuffle=True, epochs=4)
        options = {"n_steps_per_checkpoint": spacing, "first_checkpoint": first}
        return [*make_loop(Regressor(0.2), data, steps_per_call=steps_per_call, **options)]

    one, many = run(1), run(3)
    assert [c.step for c in many] == [c.step for c in one]
    assert one[-1].step == 16
    assert [c.n_examples for c in many] == [c.n_examples for c in one]
    assert [c.data_state for c in many] == [c.data_state for c in one]
    assert_equal([c.state.params for c in one], [c.state.params for c in many])


@pytest.mark.parametrize("resident", [False, True])
def test_a_loop_that_is_dropped_frees_its_state_at_once(resident):
    loop = make_loop(data=ff.ArrayStream(X, Y, batch_size=16, resident=resident))
    next(loop)
    next(loop)
    state = weakref.ref(loop.state_in_place.params["Dense_0"]["kernel"])
    stepper = weakref.ref(loop._stepper)
    gc.collect()
    gc.disable()
    try:
        del loop
        # What waited for the collector would lie beside the next loop's.
        assert stepper() is None and state() is None
    finally:
        gc.enable()


def test_an_inspection_that_failed_is_not_said_to_be_under_way():
    fails = [True]

    def apply(variables, x, **options):
        if fails[0]:
            raise RuntimeError("no way")
        return Regressor().apply(variables, x, **options)

    task = ff.TrainTask(apply, optax.sgd(0.1), "mse", ff.ArrayStream(X, Y, batch_size=16))
    loop = ff.TrainLoop(Regressor().init, task, 0, stdout=False)
    with pytest.raises(RuntimeError, match="no way"):
        next(loop)
    assert not loop._stepper.is_preparing
    fails[0] = False
    assert next(loop).step == 1


def test_data_that_sets_norms_while_it_is_read_does_no_harm():
    def batches():
        for i in range(4):
            if i == 2:
                loop.norms = ["Dense_0/.*"]
            yield X[:16], Y[:16]

    loop = make_loop(data=batches())
    last = list(loop)[-1]
    assert last.step == 4
    assert any(name.startswith("grad_norm/Dense_0") for name in last.metrics)


def test_a_program_that_failed_to_compile_is_not_said_to_be_compiling(monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no room")

    loop = make_loop()
    next(loop)
    with monkeypatch.context() as patched:
        patched.setattr(loop.strategy, "compile", fail)
        loop.steps_per_call, loop.n_steps_per_checkpoint = 2, 2
        with pytest.raises(RuntimeError, match="no room"):
            next(loop)
    loop.steps_per_call = 1
    phases = []
    loop.watchers.append(lambda step: phases.append(loop.phase))
    next(loop)
    assert phases == ["training", "training"]


@pytest.mark.parametrize(
    ("data", "n"),
    [
        (lambda: ff.ArrayStream(X, Y, batch_size=16), 1),
        (lambda: ff.ArrayStream(X, Y, batch_size=16), 2),
        (lambda: itertools.cycle([(X[:16], Y[:16]), (X[16:32], Y[16:32])]), 1),
    ],
    ids=["rows", "rows of several", "batches"],
)
def test_a_step_that_fails_loses_no_batch(data, n):
    options = {"n_steps": 8, "n_steps_per_checkpoint": 2, "first_checkpoint": 2}
    *_, whole = make_loop(data=data(), steps_per_call=n, **options)
    loop = make_loop(data=data(), steps_per_call=n, **options)
    next(loop)
    programs = loop._stepper.programs.compiled
    usual = dict(programs)

    def fail(*arguments):
        raise MemoryError("at this very step")

    programs.update(dict.fromkeys(usual, fail))
    with pytest.raises(MemoryError, match="at this very step"):
        next(loop)
    programs.update(usual)
    *_, last = loop
    assert (last.step, last.metrics) == (8, whole.metrics)
    assert_equal(last.state.params, whole.state.params)


@pytest.mark.parametrize("n", [1, 2])
def test_what_fails_beside_a_step_loses_no_batch_either(n, monkeypatch):
    def make(data):
        return make_loop(data=data, steps_per_call=n, n_steps=12, first_checkpoint=2)

    def arrays():
        return ff.ArrayStream(X, Y, batch_size=16, shuffle=True)

    def fail(*arguments):
        monkeypatch.undo()
        raise MemoryError("beside a step")

    *_, whole = make(arrays())
    for broken in "load", "_permutation":
        loop = make(data := arrays())
        if broken == "load":
            monkeypatch.setattr(loop._stepper.loader, broken, fail)
        else:  # Of the second epoch, of which two steps after three already are.
            list(loop.run_until(3))
            monkeypatch.setattr(data, broken, fail)
        with pytest.raises(MemoryError, match="beside a step"):
            list(loop.run_until(12))
        *_, last = loop.run_until(12)
        assert (last.step, int(last.state.step)) == (12, 12)
        assert last.data_state == whole.data_state
        assert_equal(last.state.params, whole.state.params)


def test_batches_are_alike_whose_structures_are_equal():
    class Label:
        def __eq__(self, other):
            return isinstance(other, Label)

        def __hash__(self):
            return 1

    @flax.struct.dataclass
    class Inputs:
        x: jax.Array
        label: Label = flax.struct.field(pytree_node=False)

    def apply(variables, inputs, **options):
        return inputs.x @ variables["params"], {}

    batches = [(Inputs(jnp.asarray(X[:16]), Label()), jnp.asarray(Y[:16])) for _ in range(3)]
    task = ff.TrainTask(apply, OPTIMIZER, "mse", batches)
    loop = ff.TrainLoop(lambda rngs, x: {"params": jnp.ones(5)}, task, 0, stdout=False)
    assert [checkpoint.step for checkpoint in loop] == [1, 2, 3]
    assert len(loop._stepper.programs.compiled) == 1


def test_data_that_has_ended_is_not_asked_again():
    class Batches:
        n_asked = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.n_asked += 1
            if self.n_asked > 3:
                raise StopIteration
            return X[:16], Y[:16]

    data = Batches()
    assert [checkpoint.step for checkpoint in make_loop(data=data)] == [1, 2, 3]
    assert data.n_asked == 4


# Against a hand-written loop, and between devices.


@pytest.mark.parametrize("n_devices", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("module", [Regressor(), Regressor(0.5), Normalized()])
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
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6),
        ours,
        {name: variables[name] for name in ours},
    )


def test_one_and_four_devices_agree():
    def train(n):
        *_, last = make_loop(n_steps=20, devices=jax.devices()[:n], n_steps_per_checkpoint=20)
        return last

    one, four = train(1), train(4)
    assert one.loss == pytest.approx(four.loss, rel=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        one.state.params,
        four.state.params,
    )


def test_every_replica_holds_the_same_state():
    loop = make_loop(Normalized(dropout=0.3), devices=jax.devices(), n_steps=3)
    list(loop)
    for leaf in jax.tree.leaves(
        loop._stepper.state.replace(key=jax.random.key_data(loop._stepper.state.key))
    ):
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(shards) == 4
        for shard in shards:
            np.testing.assert_array_equal(shard, shards[0])


def test_counters_stay_integers():
    *_, last = make_loop(Normalized(dropout=0.3), devices=jax.devices(), n_steps=3)
    calls = last.model_state["counters"]["calls"]
    assert calls.dtype == jnp.int32 and int(calls) == 3


# Speed: what the loop must not do.


def test_nothing_is_read_back_between_checkpoints(monkeypatch):
    loop = make_loop(n_steps=40, n_steps_per_checkpoint=20, first_checkpoint=20)
    next(loop)
    array_class, reads = type(jnp.zeros(())), []
    original = array_class._value

    def counted(self):
        reads.append(self.shape)
        return original.fget(self)

    def read(totals):
        reads.append("totals")
        return original_read(totals)

    original_read = loop._stepper.tally._read
    monkeypatch.setattr(loop._stepper.tally, "_read", read)
    monkeypatch.setattr(array_class, "_value", property(counted))
    loop.watchers.append(lambda step: at_step.append(len(reads)))
    at_step = []
    next(loop)
    assert at_step == [0] * 20
    assert reads == ["totals"]  # The checkpoint itself reads them.
    float(jnp.zeros(()))
    assert len(reads) == 2  # The count works.


@pytest.mark.parametrize(
    "resident, n_devices, expected",
    [(True, 1, [32, 40, 48]), (False, 1, [*range(3, 49)]), (True, 2, [*range(3, 49)])],
)
def test_no_more_than_so_many_steps_are_under_way(resident, n_devices, expected, monkeypatch):
    array_class, waited = type(jnp.zeros(())), []
    original = array_class.block_until_ready
    stream = ff.ArrayStream(X, Y, batch_size=16, resident=resident)
    loop = make_loop(data=stream, n_steps_per_checkpoint=48, devices=jax.devices()[:n_devices])
    loop.first_checkpoint = 48

    def block_until_ready(array):
        waited.append(loop.step)
        return original(array)

    monkeypatch.setattr(array_class, "block_until_ready", block_until_ready)
    loop.next_checkpoint()
    assert waited == expected


def test_a_long_run_over_several_devices_does_not_abort():
    loop = make_loop(n_steps=400, n_steps_per_checkpoint=399, devices=jax.devices())
    assert [c.step for c in loop] == [1, 400]


def test_the_running_metrics_can_be_read_at_any_step():
    loop, seen = make_loop(n_steps=4, n_steps_per_checkpoint=4, first_checkpoint=4), []
    loop.watchers.append(lambda step: seen.append(loop.running_metrics()["loss"]))
    (checkpoint,) = loop
    assert len(seen) == 4 and seen[-1] == checkpoint.loss
    assert loop.running_metrics() == {}


# Interrupts.


def test_an_interrupt_waits_until_the_batch_is_trained_on():
    pulled = itertools.count()

    def batches():
        for i in range(6):
            if next(pulled) == 3:
                signal.raise_signal(signal.SIGINT)
            yield X[i * 8 : i * 8 + 8], Y[i * 8 : i * 8 + 8]

    loop = make_loop(data=batches(), n_steps_per_checkpoint=5, first_checkpoint=5)
    with pytest.raises(KeyboardInterrupt):
        next(loop)
    assert loop.step == 4 == int(loop.state.step)
    assert [c.step for c in loop] == [5, 6]
    whole = make_loop(data=[(X[i * 8 : i * 8 + 8], Y[i * 8 : i * 8 + 8]) for i in range(6)])
    *_, last = whole
    assert_equal(last.state, loop.state)


def test_a_second_interrupt_is_not_held_back():
    def hung():
        yield X[:8], Y[:8]
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("still waiting for the loader")

    loop = make_loop(data=hung())
    assert next(loop).step == 1
    with pytest.raises(KeyboardInterrupt):
        next(loop)
    assert loop.step == 1


def test_after_an_interrupted_callback_the_checkpoint_is_delivered_still():
    calls = []

    def interrupted(checkpoint):
        calls.append(checkpoint.step)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return checkpoint.with_metrics({"seen": 1.0})

    before = []
    loop = make_loop(n_steps=3, callbacks=[lambda c: before.append(c.step), interrupted])
    next(loop)
    with pytest.raises(KeyboardInterrupt):
        next(loop)
    rest = list(loop)
    assert [c.step for c in rest] == [2, 3] and rest[0].metrics["seen"] == 1.0
    assert before == [1, 2, 3] and calls == [1, 2, 2, 3]


def test_the_handler_of_the_user_is_put_back():
    present = signal.getsignal(signal.SIGINT)
    loop = make_loop(n_steps=1)
    next(loop)
    assert signal.getsignal(signal.SIGINT) is present


def test_a_loop_trains_in_another_thread():
    steps = []
    thread = threading.Thread(target=lambda: steps.extend(c.step for c in make_loop(n_steps=2)))
    thread.start()
    thread.join()
    assert steps == [1, 2]


def test_an_error_in_the_users_code_loses_nothing():
    loop, steps = make_loop(n_steps=4), []
    with pytest.raises(ZeroDivisionError):
        for checkpoint in loop:
            steps.append(checkpoint.step)
            if checkpoint.step == 2:
                _ = 1 / 0
    steps += [c.step for c in loop]
    assert steps == [1, 2, 3, 4]


# Ending early.


def finishing(loop, at):
    """The loop, told to finish by a watcher at a step."""
    loop.watchers.append(lambda step: loop.finish() if step == at else None)
    return loop


def test_finish_ends_with_the_step_that_is_being_taken():
    loop = finishing(make_loop(n_steps=40, n_steps_per_checkpoint=20), at=7)
    checkpoints = list(loop)
    assert [(c.step, c.stop, c.n_completed_steps) for c in checkpoints] == [
        (1, False, 1),
        (7, True, 6),
    ]
    assert_equal(checkpoints[-1].state, list(make_loop(n_steps=7))[-1].state)
    assert list(loop) == []


def test_finish_is_honoured_by_run_until_and_may_be_gone_on_from():
    loop = finishing(make_loop(n_steps_per_checkpoint=50), at=7)
    assert [c.step for c in loop.run_until(20)] == [1, 7]
    assert [c.step for c in loop.run_until(20)] == [20]


def test_finish_in_a_fit_ends_the_fit():
    class Finish:
        def attach(self, loop):
            finishing(loop, at=6)

        def __call__(self, checkpoint):
            return checkpoint

    model = ff.Model(Regressor(), OPTIMIZER, "mse", ["mae"])
    history = model.fit(X, Y, batch_size=16, epochs=5, callbacks=[Finish()], verbose=0)
    assert (model.step, history.steps) == (6, [4, 6])


def test_finish_in_a_callback_stops_with_its_checkpoint():
    loop = make_loop(n_steps=10)
    loop.callbacks = [lambda c: loop.finish() if c.step == 3 else None, lambda c: c]
    assert [(c.step, c.stop) for c in loop] == [(1, False), (2, False), (3, True)]


def test_finish_in_the_for_itself_takes_no_further_step():
    loop = make_loop(n_steps=10)
    for checkpoint in loop:
        if checkpoint.step == 4:
            loop.finish()
    assert loop.step == 4


def test_finish_with_several_steps_per_call_ends_with_the_call():
    loop = make_loop(Regressor(0.2), n_steps=40, first_checkpoint=20, steps_per_call=4)
    finishing(loop, at=8)
    assert [c.step for c in loop] == [8]


def test_finish_outlives_an_exception_between_it_and_the_checkpoint():
    loop = finishing(make_loop(n_steps=10, first_checkpoint=10), at=3)

    def fail_once(step):
        loop.watchers.pop()
        raise RuntimeError("once")

    loop.watchers.append(lambda step: fail_once(step) if step == 3 else None)
    with pytest.raises(RuntimeError, match="once"):
        next(loop)
    assert [(c.step, c.stop) for c in loop] == [(3, True)]


def test_examples_are_counted_without_padding():
    x = X[:50]
    data = ff.ArrayStream(x, x.sum(1), batch_size=16, epochs=2)
    loop = make_loop(data=data, first_checkpoint=4, n_steps_per_checkpoint=4, devices=jax.devices())
    assert [c.n_examples for c in loop] == [50, 50]
    loop = make_loop(Regressor(0.2), n_steps=8, first_checkpoint=8, steps_per_call=4)
    assert next(loop).n_examples == 8 * 16
