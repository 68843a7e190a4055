"""What can be changed while training goes on: hyperparameters, frozen parameters."""

import xml.etree.ElementTree as ET

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from internals import programs_of
from loops import (
    Regressor,
    X,
    Y,
    assert_close,
    assert_equal,
    given,
    init_of,
    make_loop,
    make_task,
    waves,
)
from marks import thorough

import flaxfit as ff

PLAIN_AND_MORE = [thorough({}), {"clip_norm": 1.0, "ema": 0.9}]
FIRST, LAST = "Dense_0", "Dense_1"


def adam(rate=0.01):
    return ff.optim.OptimizerDef(optax.adam, learning_rate=rate)


def loop_of(optimizer, n_devices=1, **options):
    devices = {"devices": jax.devices()[:n_devices]}
    return make_loop(task=make_task(optimizer=optimizer, **options), n_steps=6, **devices)


def model_of(optimizer=None, loss="mse", **options):
    options["strategy"] = ff.DataParallel(jax.devices()[:1])
    return ff.Model(Regressor(), optimizer or optax.adam(0.01), loss, **options)


def fit(*models, **options):
    """The history of the last one."""
    options = {"batch_size": 16, "shuffle": False, "verbose": 0, **options}
    return [model.fit(X, Y, **options) for model in models][-1]


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", [thorough(1), 2])
def test_a_rate_that_is_set_between_steps_acts_without_a_new_program(n_devices):
    loop = loop_of(adam(), n_devices)
    rates = []
    for checkpoint in loop:
        rates.append(round(checkpoint.metrics["learning_rate"], 6))
        loop.set_hyperparams(learning_rate=0.01 / (checkpoint.step + 1))
    assert rates == [round(0.01 / step, 6) for step in range(1, 7)]
    assert len(programs_of(loop)) == 1
    schedule = optax.adam(lambda count: 0.01 / (count + 1))
    expected = loop_of(schedule, n_devices)
    list(expected)
    assert_close(loop.state.params, expected.state.params, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("borrows", [thorough(False), True])
def test_a_rate_that_a_callback_sets_is_not_put_on_a_state_of_another_step(borrows):
    seen = {}

    class Tune:
        borrows = False

        def __call__(self, checkpoint):
            if checkpoint.step == 1:
                seen["first"] = loop.owned(checkpoint)
            if checkpoint.step == 3:
                loop.set_hyperparams(learning_rate=0.5)
                loop.restore(seen["first"])

    class Save:
        order, borrows = "last", True

        def __call__(self, checkpoint):
            seen["saved"] = checkpoint.step, int(checkpoint.state.step)

    Tune.borrows = borrows
    loop = loop_of(optax.inject_hyperparams(optax.adam)(0.1))
    loop.callbacks = [Tune(), Save()]
    for _ in range(3):
        loop.next_step()
    assert seen["saved"] == (3, 3)
    assert loop.step == 1 and loop.hyperparams["learning_rate"] == pytest.approx(0.1)


@pytest.mark.slow
def test_an_override_beats_a_schedule_until_it_is_cleared():
    loop = loop_of(adam(optax.linear_schedule(0.6, 0.0, 6)))
    rates = []
    for checkpoint in loop:
        rates.append(checkpoint.metrics["learning_rate"])
        if checkpoint.step == 2:
            loop.set_hyperparams(learning_rate=7.0)
        if checkpoint.step == 4:
            loop.set_hyperparams(learning_rate=None)
    assert rates == pytest.approx([0.6, 0.5, 7.0, 7.0, 0.2, 0.1])


def test_an_unknown_hyperparameter_lists_those_that_there_are():
    loop = loop_of(adam())
    with pytest.raises(ValueError, match=r"called lr.*learning_rate"):
        loop.set_hyperparams(lr=0.1)
    assert loop.hyperparams["learning_rate"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    "optimizer", [optax.contrib.prodigy(), optax.adam(optax.linear_schedule(0.5, 0.0, 4))]
)
def test_an_optimizer_whose_rate_is_not_known_has_none_to_read_or_set(optimizer):
    loop = loop_of(optimizer)
    assert loop.hyperparams == {} and "learning_rate" not in next(loop).metrics
    with pytest.raises(ValueError, match="OptimizerDef"):
        loop.set_hyperparams(learning_rate=0.1)


class Smooth(nn.Module):
    """A model whose moments stay away from 0, where rounding would show."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(6, kernel_init=waves, name="stem")(x))
        return nn.Dense(2, kernel_init=waves, name="head")(x)


def smooth_loop(optimizer, n_devices, **options):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(32, 4)).astype(np.float32)
    y = np.tanh(x @ rng.normal(size=(4, 2))).astype(np.float32)
    data = ff.ArrayStream(x, y, batch_size=8)
    task = ff.TrainTask(Smooth().apply, optimizer, "mse", data, **options)
    devices = jax.devices()[:n_devices]
    return ff.TrainLoop(init_of(Smooth(), 4), task, 0, n_steps=6, devices=devices, stdout=False)


@pytest.mark.slow
@pytest.mark.parametrize("options", PLAIN_AND_MORE, ids=["plain", "more"])
@pytest.mark.parametrize("n_devices", [thorough(1), 2])
def test_the_rate_of_a_plain_optimizer_is_set_as_that_of_an_optimizer_def(options, n_devices):
    """Also after steps with the rate that it was made with, and after a state without it."""

    def train(optimizer):
        loop = smooth_loop(optimizer, n_devices, **options)
        first = next(loop)
        next(loop)
        loop.set_hyperparams(learning_rate=0.5)
        changed = next(loop)
        loop.restore(first.state)
        assert loop.hyperparams["learning_rate"] == pytest.approx(0.01)
        states = changed.state, next(loop).state
        return [(state.params, state.opt_state) for state in states]

    assert_close(train(optax.adam(0.01)), train(adam(0.01)), rtol=1e-6)


@pytest.mark.slow
def test_a_run_goes_on_with_the_rate_that_was_set_and_a_plain_optimizer(tmp_path):
    loop = loop_of(optax.adam(0.01), clip_norm=1.0)
    loop.callbacks = [ff.checkpoints.CheckpointFileWriter(tmp_path)]
    loop.set_hyperparams(learning_rate=0.5)
    last = list(loop.run(2))[-1]
    loop.close()
    for init in ff.checkpoints.CheckpointFileReader(tmp_path, loop.state), last.state:
        task = make_task(optimizer=optax.adam(0.01), clip_norm=1.0)
        again = ff.TrainLoop(init, task, 0, stdout=False)
        assert again.hyperparams["learning_rate"] == 0.5
        assert_equal(again.state.opt_state, last.state.opt_state)


@pytest.mark.slow
@pytest.mark.parametrize("options", PLAIN_AND_MORE, ids=["plain", "more"])
@pytest.mark.parametrize("n_devices", [thorough(1), 2])
def test_thawing_keeps_the_moments_of_what_was_trained(options, n_devices):
    loop = loop_of(optax.adam(0.01), n_devices, freeze=f"{FIRST}/.*", **options)
    list(loop.run(2))
    before = loop.state
    loop.freeze = ()
    after = loop.state
    assert_equal(after.params, before.params)
    old = before.opt_state.inner
    new = after.opt_state.inner if options else after.opt_state
    old_adam, new_adam = (
        [s for s in jax.tree.leaves(tree, is_leaf=is_adam) if is_adam(s)][0] for tree in (old, new)
    )
    assert_equal(new_adam.mu[LAST], old_adam.mu[LAST])
    assert_equal(new_adam.nu[LAST], old_adam.nu[LAST])
    assert int(new_adam.count) == 2
    assert not np.any(new_adam.mu[FIRST]["kernel"])
    checkpoint = next(loop)
    assert np.any(checkpoint.state.params[FIRST]["kernel"] != before.params[FIRST]["kernel"])
    if options:
        assert_equal(after.opt_state.average[LAST], before.opt_state.average[LAST])


def is_adam(state):
    return isinstance(state, optax.ScaleByAdamState)


# A gradient that never changes, of which each step of Adam makes one of the learning rate.


def distance(outputs, targets):
    return abs(outputs - targets).mean(-1)


def sums(variables, x, **options):
    outputs = x * sum(each.sum() for each in variables["params"].values())
    return (outputs, {}) if "mutable" in options else outputs


@given
def zeros(rngs, x):
    return {"params": {name: np.zeros((64, 64), np.float32) for name in ("head", "stem")}}


def steady_loop(optimizer=None, init=zeros, *, loop=None, callbacks=(), **options):
    x, y = np.ones((8, 1), np.float32), np.full((8, 1), 1e9, np.float32)
    data = ff.ArrayStream(x, y, batch_size=8)
    optimizer = optax.adam(0.01) if optimizer is None else optimizer
    task = ff.TrainTask(sums, optimizer, distance, data, **{"freeze": "stem", **options})
    settings = {"n_steps": 99, "stdout": False, "callbacks": callbacks}
    return ff.TrainLoop(init, task, 0, **settings, **(loop or {"devices": jax.devices()[:1]}))


def steps_of(loop, n):
    """How far each parameter moves in each of n steps, in learning rates."""
    found, before = {"head": [], "stem": []}, loop.state.params
    for checkpoint in loop.run(n):
        for name, steps in found.items():
            moved = np.abs(checkpoint.state.params[name] - before[name])
            assert np.ptp(moved) < 1e-6
            steps.append(float(moved.mean()) / 0.01 / checkpoint.n_completed_steps)
        before = checkpoint.state.params
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "options"),
    [
        ({"devices": jax.devices()[:1]}, {}),
        thorough({"devices": jax.devices()[:4]}, {"clip_norm": 1e9}),
        ({"strategy": ff.Sharded.fsdp()}, {"ema": 0.9}),
        thorough({"steps_per_call": 2, "n_steps_per_checkpoint": 4}, {}),
        ({"steps_per_call": 2, "n_steps_per_checkpoint": 4}, {"skip_nonfinite": True}),
        thorough({}, {"accumulate": 2}),
        thorough({}, {"optimizer": adam()}),
        ({}, {"optimizer": ff.optim.MultiOptimizer(("head", adam()), ("stem", optax.adam(0.01)))}),
    ],
)
def test_adam_steps_as_far_with_a_parameter_that_is_unfrozen_later(loop, options):
    loop = steady_loop(loop=loop, **options)
    assert np.allclose(steps_of(loop, 40)["stem"], 0)
    loop.freeze = ()
    np.testing.assert_allclose([*steps_of(loop, 4).values()], 1, rtol=1e-3)
    if "optimizer" not in options:  # Where the rate is one for all.
        loop.set_hyperparams(learning_rate=0.02)
        np.testing.assert_allclose([*steps_of(loop, 4).values()], 2, rtol=1e-3)


@pytest.mark.slow
def test_a_restored_run_corrects_as_the_one_that_was_saved(tmp_path):
    loop = steady_loop()
    list(loop.run(40))
    loop.freeze = ()
    loop.next_step()
    checkpoint = loop.next_step()
    with ff.checkpoints.CheckpointFileWriter(tmp_path) as writer:
        writer(checkpoint)
    list(loop.run(3))
    reader = ff.checkpoints.CheckpointFileReader(tmp_path, zeros)
    resumed = steady_loop(init=reader, freeze=())
    list(resumed.run(3))
    assert_equal(resumed.state.params, loop.state.params)
    resumed.restore(checkpoint)
    list(resumed.run(3))
    assert_equal(resumed.state.params, loop.state.params)


@pytest.mark.slow
def test_a_state_from_before_the_unfreezing_is_corrected_as_a_whole():
    loop = steady_loop()
    start = loop.state
    list(loop.run(40))
    loop.freeze = ()
    loop.next_step()
    loop.restore(start.replace_optimizer(loop.task.optimizer))
    assert np.allclose(steps_of(loop, 4)["stem"], 1, rtol=1e-3)
    assert np.allclose(steps_of(loop, 40)["head"], 1, rtol=1e-3)


def test_freezing_on_the_way_stops_there_and_a_wrong_pattern_changes_nothing():
    loop = loop_of(optax.adam(0.01))
    before = next(loop).state
    with pytest.raises(ValueError, match="matches no parameter"):
        loop.freeze = "body/.*"
    assert loop.freeze == ()
    loop.freeze = [f"{LAST}/.*"]
    after = next(loop).state
    assert loop.freeze == (f"{LAST}/.*",)
    assert_equal(after.params[LAST], before.params[LAST])
    assert np.any(after.params[FIRST]["kernel"] != before.params[FIRST]["kernel"])


# The same through a Model.


@pytest.mark.slow
def test_a_model_forwards_the_options_of_its_task():
    model = model_of(freeze=f"{FIRST}/.*", ema=0.5, clip_norm=1.0)
    fit(model, epochs=2)
    assert model.freeze == (f"{FIRST}/.*",)
    averaged = ff.optim.swap_ema(model.state).params
    # As many rows at a time as a batch has: others round otherwise.
    apply = jax.jit(Regressor().apply)
    expected = np.concatenate([apply({"params": averaged}, x) for x in np.split(X, 2)])
    np.testing.assert_allclose(model.predict(X), expected, rtol=1e-5)
    loss = float(np.mean((expected - Y) ** 2))
    assert model.evaluate(X, Y)["loss"] == pytest.approx(loss, rel=1e-5)
    frozen = model.state.params[FIRST]["kernel"]
    model.freeze = ()
    fit(model)
    assert np.any(model.state.params[FIRST]["kernel"] != frozen)


@pytest.mark.slow
def test_a_model_validates_its_average_and_keeps_it_in_its_files(tmp_path):
    model, other = (model_of(optax.adam(0.05), ema=0.9) for _ in range(2))
    history = fit(model, epochs=2, validation_data=(X, Y))
    assert history["val_loss"][-1] == pytest.approx(model.evaluate(X, Y)["loss"], rel=1e-6)
    model.save(tmp_path)
    other.load(tmp_path)
    np.testing.assert_array_equal(other.predict(X), model.predict(X))
    fit(model, other)
    np.testing.assert_array_equal(other.predict(X), model.predict(X))


@pytest.mark.slow
def test_a_model_in_sixteen_bits_evaluates_and_predicts_in_them():
    model = model_of(precision="bfloat16")
    fit(model)
    outputs = model.predict(X)
    exact = jax.jit(Regressor().apply)({"params": model.state.params}, X)
    assert outputs.dtype == np.float32
    assert 0 < np.abs(outputs - exact).max() < 0.05
    assert model.evaluate(X, Y)["loss"] == pytest.approx(np.mean((outputs - Y) ** 2), rel=1e-5)


@pytest.mark.slow
def test_float16_survives_a_save_and_a_load(tmp_path):
    model, other = (model_of(precision="float16") for _ in range(2))
    fit(model)
    model.save(tmp_path)
    other.load(tmp_path)
    fit(model, other)
    assert_equal(other.state.params, model.state.params)
    assert_equal(other.state.opt_state.scale.scale, model.state.opt_state.scale.scale)


@pytest.mark.slow
def test_a_range_test_finds_a_rate_and_leaves_the_model_alone():
    sgd = ff.optim.OptimizerDef(optax.sgd, learning_rate=0.01)
    model, untouched = model_of(sgd), model_of(sgd)
    fit(model, untouched)
    found = model.find_lr(X, Y, batch_size=16, lowest=1e-4, highest=100.0, n_steps=60)
    assert found.rates[0] == pytest.approx(1e-4)
    assert len(found.rates) < 60
    assert 1e-2 < found.suggestion < 2
    assert found.suggestion < found.rates[np.argmin(found.losses)]
    assert "suggestion" in repr(found)
    page = ET.fromstring(found._repr_html_())
    assert page.findtext("b") == f"suggested learning rate: {found.suggestion:.4g}"
    assert page.find("div/svg") is not None
    assert model.step == 4
    fit(model, untouched)
    assert_equal(model.state.params, untouched.state.params)


def test_a_range_test_works_before_any_fit_and_draws_itself():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed").use("agg")
    model = model_of(adam())
    found = model.find_lr(X, Y, batch_size=16, n_steps=20)
    assert found.plot().get_xscale() == "log"
    assert model.step == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [({"lowest": 1.0, "highest": 0.1}, "lowest=1.0"), ({"n_steps": 2}, "10 steps or more")],
)
def test_a_range_that_is_none_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        model_of(adam()).find_lr(X, Y, **options)


@pytest.mark.slow
def test_a_loss_that_never_falls_suggests_no_rate():
    model = model_of(adam(), lambda outputs, targets: 0 * outputs)
    with pytest.raises(ValueError, match="has not fallen at any rate"):
        model.find_lr(X, Y, n_steps=12)


def test_a_range_test_needs_a_rate_to_set_and_data_to_repeat():
    with pytest.raises(ValueError, match=r"cannot set.*OptimizerDef"):
        model_of(optax.contrib.prodigy()).find_lr(X, Y)
    with pytest.raises(ValueError, match="consume this data"):
        model_of(adam()).find_lr(batch for batch in [(X, Y)])


@pytest.mark.slow
def test_a_range_test_waits_for_the_scale_of_the_loss():
    """At the first scale of float16 these losses overflow, which is not divergence."""
    model = model_of(adam(), precision="float16")
    found = model.find_lr(X, 100 * Y, batch_size=16, lowest=1e-4, highest=10.0, n_steps=30)
    assert found.rates[0] == pytest.approx(1e-4)
    assert len(found.rates) > 10


@pytest.mark.slow
def test_trials_leave_a_stream_of_the_user_where_it_stands():
    stream = ff.ArrayStream(X, Y, batch_size=8, shuffle=True)
    next(stream)
    position = stream.get_state()
    model = model_of(adam())
    model.find_lr(stream, lowest=1e-3, n_steps=20)
    assert stream.get_state() == position
    model.find_batch_size(stream, limit=1e9, largest=16)
    assert stream.get_state() == position


OPTIONS = [
    thorough({"clip_norm": 0.1}),
    thorough({"ema": 0.5}),
    thorough({"freeze": f"{FIRST}/.*"}),
    {"clip_norm": 0.1, "ema": 0.5, "freeze": f"{FIRST}/.*"},
]


def losses_from(state, task):
    return [c.loss for c in ff.TrainLoop(state, task, n_steps=3, stdout=False)]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_the_options_of_a_task_are_put_around_a_state_of_the_users_optimizer(options):
    optimizer = optax.adam(0.01)
    task = make_task(data=[(X, Y)] * 3, optimizer=optimizer, **options)
    state, expected = (
        ff.init_state(Regressor().init, each, 0, (X[:1],)) for each in (optimizer, task.optimizer)
    )
    assert losses_from(state, task) == losses_from(expected, task)


@pytest.mark.slow
def test_arrays_that_are_read_when_asked_for_are_read_at_the_start():
    task = make_task(data=[(X, Y)] * 3, optimizer=optax.sgd(0.1))
    state = ff.init_state(Regressor().init, optax.sgd(0.1), 0, (X[:1],))
    lazy = jax.tree.map(
        lambda x: ff.importers.LazyThreadPoolArray(x.shape, x.dtype, lambda: np.asarray(x)),
        state.params,
    )
    assert losses_from(state, task) == losses_from(state.replace(params=lazy), task)


def test_a_state_of_another_optimizer_is_refused_at_once():
    state = ff.init_state(Regressor().init, optax.sgd(0.1), 0, (X[:1],))
    with pytest.raises(ValueError, match=r"does not match task\.optimizer(.|\n)*init_state"):
        ff.TrainLoop(state, make_task(), n_steps=1, stdout=False)


def test_the_definition_of_an_optimizer_object_is_taken():
    optimizer = adam().create({"w": np.ones(1)})
    assert make_task(optimizer=optimizer).optimizer is optimizer.optimizer_def


@pytest.mark.slow
def test_loaded_weights_are_used_where_there_is_no_average_of_them(tmp_path):
    model, fresh = (model_of(optax.sgd(0.1), ema=0.9) for _ in range(2))
    fit(model, epochs=2)
    model.save_weights(tmp_path / "w.safetensors")
    fresh.load_weights(tmp_path / "w.safetensors")
    np.testing.assert_array_equal(fresh.predict(X), model.predict(X))
    assert fresh.evaluate(X, Y) == model.evaluate(X, Y)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"accumulate": 1.5}, TypeError, "accumulate must be an integer, got 1.5"),
        ({"accumulate": True}, TypeError, "got True"),
        ({"accumulate": 0}, ValueError, "accumulate must be 1 or more, got 0"),
        ({"clip_norm": "1"}, ValueError, "clip_norm must be more than 0, or None, got '1'"),
        ({"ema": "0.9"}, ValueError, "ema must lie between 0 and 1, such as 0.999, got '0.9'"),
        ({"freeze": "("}, ValueError, "freeze takes patterns"),
        ({"freeze": None}, ValueError, "freeze takes patterns"),
        ({"freeze": [1]}, ValueError, "freeze takes patterns"),
    ],
)
def test_wrong_options_of_a_task_are_refused_in_words(options, error, message):
    with pytest.raises(error, match=message):
        make_task(**options)
