"""Callbacks that set the learning rate, in a real loop."""

import re

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from loops import given

import flaxfit as ff
from flaxfit.callbacks import LearningRateScheduler, ReduceLROnPlateau, every
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter, list_steps

X = np.ones((8, 1), np.float32)


def apply(variables, x, **_):
    return x * variables["params"]["w"] + variables["params"]["b"], {}


@given
def zeros(rngs, x):
    return {"params": {"w": np.zeros(1), "b": np.zeros(1)}}


def make_loop(callbacks, optimizer=None, n_steps=6, init=zeros):
    optimizer = optimizer or optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    task = ff.TrainTask(apply, optimizer, lambda outputs, _: 0 * outputs, [(X, X)] * 20)
    options = {"n_steps": n_steps, "devices": jax.devices()[:1], "stdout": False}
    return ff.TrainLoop(init, task, 0, callbacks=callbacks, **options)


def rates_of(loop):
    return [round(checkpoint.metrics["learning_rate"], 6) for checkpoint in loop]


def test_a_scheduler_sets_the_rate_of_the_steps_up_to_the_next_checkpoint():
    seen = []

    def schedule(step, rate):
        seen.append((step, round(rate, 6)))
        return 0.1 * (step + 1)

    def keep_less(checkpoint):  # It leaves the state of the loop alone.
        return checkpoint.replace(state=checkpoint.state.for_inference())

    loop = make_loop([LearningRateScheduler(schedule), keep_less], n_steps=3)
    assert rates_of(loop) == [0.1, 0.2, 0.3]
    assert seen == [(0, 1.0), (1, 0.1), (2, 0.2)]


DEFINED = ff.optim.OptimizerDef(optax.sgd, learning_rate=1.0)


@pytest.mark.parametrize(
    ("losses", "options", "rates"),
    [
        ([5, 4, 4, 4, 4, 3], {"patience": 2}, [1, 1, 1, 1, 0.5, 0.5]),
        ([5, 4, 4, 4, 4, 3], {"patience": 2, "optimizer": DEFINED}, [1, 1, 1, 1, 0.5, 0.5]),
        ([5, 5, 5, 4, 4, 4, 4], {"patience": 2}, [1, 1, 1, 0.5, 0.5, 0.5, 0.25]),
        ([5] * 6, {}, [1, 1, 0.5, 0.25, 0.125, 0.0625]),
        ([5] * 6, {"cooldown": 3}, [1, 1, 0.5, 0.5, 0.5, 0.25]),
        ([5] * 6, {"min_lr": 0.3}, [1, 1, 0.5, 0.3, 0.3, 0.3]),
        ([5, 4.95, 4.9], {"min_delta": 0.2}, [1, 1, 0.5]),
        ([np.nan] * 3, {}, [1, 0.5, 0.25]),
        ([np.nan] * 3, {"verbose": 0}, [1, 0.5, 0.25]),
    ],
)
def test_a_plateau_halves_the_rate_for_the_steps_after_it(losses, options, rates, capsys):
    options, values = {"patience": 1, **options}, iter(losses)
    optimizer = options.pop("optimizer", None)

    def measure(checkpoint):
        return checkpoint.with_metrics({"val_loss": next(values)})

    callbacks = [measure, ReduceLROnPlateau(factor=0.5, **options)]
    assert rates_of(make_loop(callbacks, optimizer, n_steps=len(losses))) == rates
    best = "never was finite" if np.isnan(losses[0]) else r"stands at \d"
    said = capsys.readouterr().err
    if options.get("verbose") == 0:
        assert said == ""
    else:
        assert len(re.findall(f"val_loss {best}, learning rate lowered to 0.5\n", said)) == 1


@pytest.mark.slow
def test_a_plateau_lowers_the_rate_of_a_plain_optimizer_in_fit():
    losses = []
    for optimizer in optax.sgd(0.125), ff.optim.OptimizerDef(optax.sgd, learning_rate=0.125):
        model = ff.Model(nn.Dense(1), optimizer, "mse")
        plateau = ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9)
        history = model.fit(X, X, epochs=4, callbacks=[plateau], verbose=0)
        assert history["learning_rate"] == [0.125, 0.125, 0.0625, 0.03125]
        losses.append(history["loss"])
    assert losses[0] == losses[1]


def test_a_plateau_goes_on_counting_after_a_restart():
    first, second = ReduceLROnPlateau("loss", patience=3), ReduceLROnPlateau("loss", patience=3)
    checkpoint = ff.Checkpoint(step=1, state=None, metrics={"loss": 1.0})
    first.attach(make_loop([]))
    for _ in range(3):
        first(checkpoint)
    loop = make_loop([])
    second.attach(loop)
    second.set_state(first.get_state())
    second(checkpoint)
    assert loop.hyperparams["learning_rate"] == pytest.approx(0.1)


def test_each_group_is_lowered_by_itself_or_all_together():
    optimizer = ff.optim.MultiOptimizer(
        ("w", ff.optim.OptimizerDef(optax.sgd, learning_rate=1.0)),
        ("b", ff.optim.OptimizerDef(optax.sgd, learning_rate=0.5)),
    )
    for group, rate_of_w in ("b", 1.0), (None, 0.1):
        plateau = ReduceLROnPlateau("loss", factor=0.1, patience=1, group=group)
        checkpoint = list(make_loop(plateau, optimizer, n_steps=3))[-1]
        assert checkpoint.metrics["learning_rate/w"] == pytest.approx(rate_of_w)
        assert checkpoint.metrics["learning_rate/b"] == pytest.approx(0.05)


SCHEDULE = optax.linear_schedule(0.1, 0.0, 10)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (optax.contrib.dadapt_adamw(0.1), r"cannot set the learning rate.*OptimizerDef"),
        (optax.sgd(SCHEDULE), r"cannot set the learning rate.*OptimizerDef"),
        (
            ff.optim.OptimizerDef(optax.sgd, learning_rate=SCHEDULE),
            r"made with a schedule.*optax.adam\(1e-3\)",
        ),
    ],
)
def test_an_optimizer_whose_rate_cannot_be_set_is_refused_at_once(optimizer, words):
    for callback in ReduceLROnPlateau("loss"), LearningRateScheduler(lambda step, rate: rate):
        with pytest.raises(ValueError, match=words):
            make_loop(callback, optimizer)


@pytest.mark.parametrize("options", [{"factor": 2}, {"patience": -1}, {"min_lr": -0.1}])
def test_wrong_options_of_a_plateau_are_refused(options):
    with pytest.raises(ValueError, match=str(next(iter(options.values())))):
        ReduceLROnPlateau(**options)


def test_without_a_loop_they_say_where_they_belong(checkpoint_at):
    scheduler = LearningRateScheduler(lambda step, rate: rate)
    with pytest.raises(ValueError, match="callbacks of a loop"):
        scheduler(checkpoint_at(1))


def test_a_group_is_meant_by_its_position_as_in_the_loop():
    """Whatever the alphabet says, and though another group holds no rate."""
    groups = ff.optim.MultiOptimizer(("w", DEFINED), ("b", DEFINED))
    loop = make_loop(LearningRateScheduler(lambda step, rate: 0.5, group=0), groups)
    next(loop)
    assert loop.hyperparams == {"w": {"learning_rate": 0.5}, "b": {"learning_rate": 1.0}}
    assert list(loop.hyperparams) == ["w", "b"]
    plain_first = ff.optim.MultiOptimizer(("w", optax.sgd(1.0)), ("b", DEFINED))
    with pytest.raises(ValueError, match="holds none in group 0"):
        next(make_loop(LearningRateScheduler(lambda step, rate: 0.5, group=0), plain_first))
    with pytest.raises(ValueError, match=r"no group 5(.|\n)*'w', 'b'"):
        next(make_loop(ReduceLROnPlateau("loss", group=5), plain_first))


def test_groups_within_groups_have_their_rates_set_and_reported():
    outer = ff.optim.MultiOptimizer((".*", ff.optim.MultiOptimizer(("w", DEFINED))))
    scheduler = LearningRateScheduler(lambda step, rate: 0.5 * rate, group=".*")
    loop = make_loop(scheduler, outer, n_steps=2)
    assert [checkpoint.metrics["learning_rate/w"] for checkpoint in loop] == [0.5, 0.25]


@pytest.mark.slow
def test_a_checkpoint_file_holds_the_rate_that_was_set_at_it(tmp_path):
    """A run that is killed right after it continues as the whole one does."""

    def make(folder, init=zeros):
        plateau = ReduceLROnPlateau("loss", factor=0.5, patience=2)
        save = CheckpointFileWriter(tmp_path / folder, keep=None)
        return make_loop([save, plateau], init=init)

    expected = rates_of(make("whole"))
    assert len(set(expected)) == 3
    for step in list_steps(tmp_path / "whole")[:-1]:
        reader = CheckpointFileReader(tmp_path / "whole", make_loop([]).state, which=step)
        assert rates_of(make(f"from {step}", reader)) == expected[step:]


def test_a_checkpoint_has_the_rates_that_callbacks_set_and_the_users_come_after_it():
    def lower(checkpoint):
        loop.set_hyperparams(learning_rate=0.5)

    loop = make_loop([lower], n_steps=2)
    first = next(loop)
    assert ff.optim.hyperparams(first.state.opt_state)["learning_rate"] == 0.5
    assert first.metrics["learning_rate"] == 1.0  # That of its steps.
    loop.set_hyperparams(learning_rate=0.25)
    assert ff.optim.hyperparams(first.state.opt_state)["learning_rate"] == 0.5
    assert next(loop).metrics["learning_rate"] == 0.25


def test_a_rate_that_is_set_after_an_interrupt_does_not_come_back_in_a_later_checkpoint():
    class Interrupted:
        order, is_due = "last", True

        def __call__(self, checkpoint):
            if self.is_due:
                self.is_due = False
                raise KeyboardInterrupt

    loop = make_loop([Interrupted()])
    with pytest.raises(KeyboardInterrupt):
        next(loop)
    loop.set_hyperparams(learning_rate=0.5)
    next(loop)
    loop.set_hyperparams(learning_rate=0.25)
    last = next(loop)
    assert last.metrics["learning_rate"] == 0.25
    assert ff.optim.hyperparams(last.state.opt_state)["learning_rate"] == 0.25


def halving(calls):
    def schedule(step, rate):
        calls.append((step, rate))
        return rate / 2

    return LearningRateScheduler(schedule)


@pytest.mark.slow
def test_a_relative_rule_goes_on_after_a_restart_as_if_uninterrupted(tmp_path):
    calls, resumed = [], []
    whole = rates_of(make_loop(halving(calls), n_steps=4))
    assert whole == [0.5, 0.25, 0.125, 0.0625]
    rates_of(make_loop([halving([]), CheckpointFileWriter(tmp_path)], n_steps=2))
    reader = CheckpointFileReader(tmp_path, make_loop(()).state)
    assert rates_of(make_loop(halving(resumed), n_steps=4, init=reader)) == whole[2:]
    assert resumed == calls[2:]


def test_a_relative_rule_is_called_once_at_each_position_however_often_training_is_begun():
    calls, loop = [], make_loop(())
    for n in (1, 2, 1):  # As each call of `fit` does.
        loop.callbacks = [halving(calls)]
        list(loop.run(n))
    assert [step for step, _ in calls] == [0, 1, 2, 3]
    assert loop.hyperparams["learning_rate"] == pytest.approx(0.0625)


class Failing:
    """Batches; the first few times that one is fetched fail."""

    def __init__(self, n_failures):
        self.n_failures = n_failures

    def __iter__(self):
        return self

    def __next__(self):
        self.n_failures -= 1
        if self.n_failures >= 0:
            raise OSError
        return X, X


def test_a_rate_with_which_no_step_was_taken_is_put_back():
    calls, loop = [], make_loop(())
    loop.data = Failing(2)
    for _ in range(2):
        loop.callbacks = [halving(calls)]
        with pytest.raises(OSError):
            next(loop)
        loop.close()
    assert calls == [(0, 1.0), (0, 1.0)]
    assert loop.hyperparams["learning_rate"] == 1.0


def test_a_step_that_failed_is_tried_again_with_the_same_rate():
    calls, loop = [], make_loop(())
    loop.data, loop.callbacks = Failing(1), [halving(calls)]
    with pytest.raises(OSError):
        next(loop)
    assert next(loop).metrics["learning_rate"] == 0.5
    assert calls == [(0, 1.0)]


def test_a_restored_state_gets_the_rate_of_its_position():
    loop = make_loop(LearningRateScheduler(lambda step, rate: rate / 2))
    loop.n_steps_per_checkpoint, loop.n_steps = 2, 20
    first = next(loop)
    rates = [first.metrics["learning_rate"], next(loop).metrics["learning_rate"]]
    loop.restore(first)
    assert [next(loop).metrics["learning_rate"] for _ in range(2)] == [rates[1], rates[1] / 2]


def test_every_spares_a_scheduler_checkpoints():
    scheduler = every(2, LearningRateScheduler(lambda step, rate: rate / 2))
    assert rates_of(make_loop(scheduler, n_steps=5)) == [0.5, 0.5, 0.25, 0.25, 0.125]
