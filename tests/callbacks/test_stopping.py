import json
import math

import flax.linen as nn
import numpy as np
import optax
import pytest
from loops import make_weight_loop
from marks import thorough

from flaxfit import Checkpoint, Model, TrainState
from flaxfit.callbacks import EarlyStopping, StopOnNaN, Unfreeze, every


def stops(stopping, values, name="val_loss"):
    """Whether the callback stops training at each of these values."""
    return [
        stopping(Checkpoint(step=step, state=None, metrics={name: value})).stop
        for step, value in enumerate(values, start=1)
    ]


def state_of(value, step=0):
    """A training state whose one parameter and one statistic have this value."""
    value = np.full(1, value, np.float32)
    return TrainState(np.int32(step), {"w": value}, (), {"batch_stats": {"mean": value}}, None)


@pytest.mark.parametrize(
    ("patience", "expected"),
    [
        (0, [False, False, True, True, False, True]),
        (1, [False, False, True, True, False, True]),
        (2, [False, False, False, True, False, False]),
        (9, [False] * 6),
    ],
)
def test_training_stops_after_patience_checkpoints_without_improvement(patience, expected):
    values = [0.9, 0.5, 0.6, 0.7, 0.4, 0.5]
    assert stops(EarlyStopping(patience=patience), values) == expected


def test_an_improvement_must_exceed_min_delta_and_a_tie_is_none():
    assert stops(EarlyStopping(patience=2), [0.5, 0.5, 0.5]) == [False, False, True]
    stopping = EarlyStopping(min_delta=0.125)
    assert stops(stopping, [1.0, 0.875, 0.75]) == [False, True, False]
    assert stopping.best_value == 0.75


@pytest.mark.parametrize(
    ("monitor", "mode", "best"),
    [
        ("val_loss", "auto", 1.0),
        ("val_accuracy", "auto", 3.0),
        ("val_loss", "max", 3.0),
        ("val_accuracy", "min", 1.0),
    ],
)
def test_the_mode_follows_the_name_unless_it_is_given(monitor, mode, best):
    stopping = EarlyStopping(monitor, mode=mode, patience=9)
    stops(stopping, [2.0, 3.0, 1.0], monitor)
    assert stopping.best_value == best


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["val_loss", "val_accuracy"])
def test_a_value_that_is_not_finite_stops_at_once_and_is_never_best(name, bad, capsys):
    stopping = EarlyStopping(name, patience=9)
    assert stops(stopping, [0.5, bad], name) == [False, True]
    assert (stopping.best_value, stopping.best_step) == (0.5, 1)
    assert f"step 2: {name} is {bad}, training stops" in capsys.readouterr().err
    stopping = EarlyStopping(name, patience=3, check_finite=False)
    assert stops(stopping, [bad, 0.5, bad, bad, bad], name) == [False] * 4 + [True]
    assert (stopping.best_value, stopping.best_step) == (0.5, 2)


def test_checkpoints_without_the_metric_do_not_count_once_it_was_there(checkpoint_at):
    stopping = EarlyStopping()
    stopping(checkpoint_at(10, val_loss=0.5))
    assert not stopping(checkpoint_at(15, loss=0.5)).stop
    assert stopping(checkpoint_at(20, val_loss=0.6)).stop


@pytest.mark.parametrize(
    "options",
    [{"patience": -1}, {"min_delta": -0.1}, {"mode": "lowest"}, {"baseline": "0.3"}],
)
def test_senseless_options_are_refused(options):
    with pytest.raises(ValueError, match="must"):
        EarlyStopping(**options)


def test_close_puts_the_best_weights_and_statistics_back_and_leaves_the_rest(
    make_loop, checkpoint_at
):
    stopping, loop = EarlyStopping(patience=9), make_loop()
    stopping.attach(loop)
    for step, loss in enumerate([0.9, 0.1, 0.5], start=1):
        loop.step, loop.state = step, state_of(step, step)
        stopping(checkpoint_at(step, state=loop.state, val_loss=loss))
    stopping.close()
    assert float(loop.state.params["w"][0]) == 2.0
    assert float(loop.state.model_state["batch_stats"]["mean"][0]) == 2.0
    assert int(loop.state.step) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        thorough(optax.sgd(1.5), {"ema": 0.5}),
        (optax.sgd(1.5), {"ema": 0.5, "freeze": ["bias"]}),
        (optax.contrib.schedule_free_sgd(1.5), {}),
    ],
)
def test_the_best_average_is_restored_with_the_weights(tmp_path, optimizer, options):
    x = np.linspace(-1, 2, 16, dtype=np.float32)[:, None]

    given = {"x": x, "y": 3 * x, "batch_size": 4, "shuffle": False, "verbose": 0}

    def fit(epochs=5, folder=None, **of_stopping):
        model = Model(nn.Dense(1), optimizer, "mse", **options)
        stopping = EarlyStopping("val_loss", **{"patience": 3, **of_stopping})
        more = [Unfreeze({2: "bias"})] if "freeze" in options else []
        where = {"validation_data": (x, 3 * x), "checkpoint_dir": folder}
        return model, model.fit(**given, **where, epochs=epochs, callbacks=[stopping, *more])

    model, history = fit()
    assert history["val_loss"][-1] > min(history["val_loss"])
    n_best = 1 + history["val_loss"].index(min(history["val_loss"]))
    shorter, _ = fit(n_best, restore_best=False, patience=9)
    assert model.evaluate(x, 3 * x, verbose=0) == shorter.evaluate(x, 3 * x, verbose=0)
    expected = shorter.predict(x, verbose=0)
    np.testing.assert_array_equal(model.predict(x, verbose=0), expected)
    again = model.fit(**given, epochs=1)
    assert np.isfinite(again["loss"][-1])  # The arrays can be donated.
    if "freeze" not in options:
        fit(n_best, tmp_path)
        resumed, _ = fit(5, tmp_path)
        np.testing.assert_array_equal(resumed.predict(x, verbose=0), expected)


@pytest.mark.parametrize(
    ("losses", "options", "n_restored"),
    [
        ([0.1, 0.5, 0.6], {}, 2),
        ([0.5, 0.1], {}, 0),  # The last weights are the best.
        ([math.nan, math.nan], {}, 0),
        ([0.1, 0.5], {"restore_best": False}, 0),
    ],
)
def test_close_restores_better_weights_once_after_each_training(
    make_loop, checkpoint_at, losses, options, n_restored
):
    stopping, loop = EarlyStopping(patience=9, **options), make_loop(state=state_of(1.0))
    stopping.attach(loop)
    for loop.step, loss in enumerate(losses, start=1):
        stopping(checkpoint_at(loop.step, state=loop.state, val_loss=loss))
        stopping.close()
        stopping.close()
    assert len(loop.restored) == n_restored


def test_outside_of_a_loop_it_says_that_weights_cannot_be_put_back(capsys):
    stops(EarlyStopping(restore_best=False), [0.1, 0.2])
    assert capsys.readouterr().err == ""
    stops(EarlyStopping(), [0.1, 0.2])
    assert "pass it in callbacks=" in capsys.readouterr().err


def test_patience_and_best_value_survive_as_json_and_a_new_loop_starts_without(make_loop):
    values = [0.5, 0.6, 0.7, 0.4, 0.8, 0.9, 0.7]
    first, second = EarlyStopping(patience=3), EarlyStopping(patience=3)
    results = stops(first, values[:3])
    second.set_state(json.loads(json.dumps(first.get_state())))
    results += stops(second, values[3:])
    assert results == [False] * 6 + [True] and second.best_value == 0.4
    second.attach(make_loop())
    assert not any(stops(second, values[-3:]))


def test_a_resumed_run_says_that_the_best_weights_are_elsewhere(make_loop, checkpoint_at, capsys):
    stopping, loop = EarlyStopping(patience=1), make_loop(step=20, state=state_of(1.0))
    stopping.attach(loop)
    stopping.set_state({"best_value": 0.1, "best_step": 10, "n_waited": 0})
    assert stopping(checkpoint_at(20, state=loop.state, val_loss=0.2)).stop
    stopping.close()
    assert not loop.restored
    assert "best weights (step 10) were reached before this run was resumed" in (
        capsys.readouterr().err
    )


@pytest.mark.slow
@pytest.mark.parametrize("end", ["stopped", "out of steps", "out of data", "interrupted"])
def test_a_real_loop_ends_with_its_best_weights_however_it_ends(end):
    # The weight moves towards 1 for two steps, and away from it in those that follow.
    x = np.ones((4, 1), np.float32)
    data = [(x, x * target) for target in (1, 1, 9, 9, 9, 9)]

    def measure(checkpoint):
        error = float(np.square(checkpoint.model_params - 1).sum())
        return checkpoint.with_metrics({"val_loss": error})

    def interrupt(checkpoint):
        if end == "interrupted" and checkpoint.step == 5:
            raise KeyboardInterrupt

    stopping = every(1, EarlyStopping(patience=3 if end == "stopped" else 99))
    n_steps = 4 if end == "out of steps" else 6
    loop = make_weight_loop([measure, stopping, interrupt], data, n_steps=n_steps)
    weights = {0: np.zeros(1)}
    try:
        with loop:
            for checkpoint in loop:
                weights[checkpoint.step] = checkpoint.model_params
    except KeyboardInterrupt:
        assert end == "interrupted"
    last = max(weights)
    assert last == {"stopped": 5, "out of steps": 4, "out of data": 6, "interrupted": 4}[end]
    assert min(weights, key=lambda step: abs(float(weights[step][0]) - 1)) == 2
    np.testing.assert_array_equal(loop.state.params, weights[2])
    assert not np.array_equal(weights[2], weights[last])


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_or_gradient_that_is_not_finite_is_an_error_with_its_history(
    checkpoint_at, name, value
):
    check = StopOnNaN()
    fine = {"loss": 0.5, "grad_norm": 32000.0}
    assert check(checkpoint_at(90, **fine)).metrics == fine
    last = "0.5" if name == "loss" else "3.2e\\+04"
    match = rf"{name} became {value} at step 1,180 \(last finite {last} at step 90\). Lower the"
    with pytest.raises(FloatingPointError, match=match):
        check(checkpoint_at(1180, **{**fine, name: value}))


def test_other_metrics_may_be_nan_and_a_loss_that_never_was_finite_is_told(checkpoint_at):
    assert StopOnNaN()(checkpoint_at(1, loss=0.5, auc=math.nan)).loss == 0.5
    with pytest.raises(FloatingPointError, match="no earlier checkpoint was seen"):
        StopOnNaN()(checkpoint_at(1, loss=math.nan))


def test_a_loss_that_is_not_finite_stops_instead_of_raising_on_request(capsys):
    assert stops(StopOnNaN(raise_error=False), [0.5, math.nan], "loss") == [False, True]
    assert "loss became nan at step 2" in capsys.readouterr().err


@pytest.mark.parametrize(("n_each", "last"), [(1, 3), (2, 4), (None, 8)])
def test_a_loss_that_is_not_finite_is_found_within_the_epoch_on_request(n_each, last):
    batches = [(np.full((2, 1), x, np.float32),) * 2 for x in (1, 1, np.nan, 1, 1, 1, 1, 1)]
    options = {"n_steps": 8, "n_steps_per_checkpoint": 8, "first_checkpoint": 8}
    check = StopOnNaN(raise_error=False, every=n_each)
    assert [c.step for c in make_weight_loop(check, batches, **options)] == [last]
    with pytest.raises(FloatingPointError, match=f"became nan at step {last}"):
        next(make_weight_loop(StopOnNaN(every=n_each), batches, **options))


def test_steps_between_two_looks_are_a_whole_number():
    with pytest.raises(ValueError, match="every must be 1 or more, got 0"):
        StopOnNaN(every=0)
