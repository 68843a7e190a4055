"""Callbacks that set the learning rate, in a real loop."""

import jax
import numpy as np
import optax
import pytest
from loops import given

import flaxfit as ff
from flaxfit.callbacks import LearningRateScheduler, ReduceLROnPlateau, every
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter, list_steps

X = np.ones((8, 1), np.float32)


def make_loop(callbacks, optimizer=None, n_steps=6, init=None):
    task = ff.TrainTask(
        lambda v, x, **_: (x * v["params"]["w"] + v["params"]["b"], {}),
        optimizer or optax.inject_hyperparams(optax.sgd)(learning_rate=1.0),
        lambda outputs, targets: 0 * outputs,
        [(X, X)] * 20,
    )
    return ff.TrainLoop(
        init or given(lambda rngs, x: {"params": {"w": np.zeros(1), "b": np.zeros(1)}}),
        task,
        0,
        n_steps=n_steps,
        callbacks=callbacks,
        stdout=False,
        devices=jax.devices()[:1],
    )


def rates_of(loop):
    return [round(checkpoint.metrics["learning_rate"], 6) for checkpoint in loop]


def test_a_scheduler_sets_the_rate_of_the_steps_up_to_the_next_checkpoint():
    seen = []

    def schedule(step, rate):
        seen.append((step, rate))
        return 0.1 * (step + 1)

    assert rates_of(make_loop(LearningRateScheduler(schedule), n_steps=3)) == [0.1, 0.2, 0.3]
    assert [step for step, _ in seen] == [0, 1, 2]
    assert seen[0][1] == 1.0


def plateau_with(losses, n_steps=6, **options):
    """The rates of a loop in which the watched metric takes these values."""
    values = iter(losses)

    def measure(checkpoint):
        return checkpoint.with_metrics({"val_loss": next(values)})

    plateau = ReduceLROnPlateau(factor=0.5, **options)
    return rates_of(make_loop([measure, plateau], n_steps=n_steps))


def test_a_plateau_halves_the_rate_for_the_steps_after_it():
    assert plateau_with([5, 4, 4, 4, 4, 3], patience=2) == [1, 1, 1, 1, 0.5, 0.5]


def test_a_plateau_counts_anew_after_a_reduction_and_an_improvement():
    assert plateau_with([5, 5, 5, 4, 4, 4, 4], 7, patience=2) == [1, 1, 1, 0.5, 0.5, 0.5, 0.25]


def test_a_plateau_does_not_count_while_it_cools_down():
    losses = [5] * 6
    assert plateau_with(losses, patience=1) == [1, 1, 0.5, 0.25, 0.125, 0.0625]
    assert plateau_with(losses, patience=1, cooldown=3) == [1, 1, 0.5, 0.5, 0.5, 0.25]


def test_a_plateau_stops_at_the_lowest_rate():
    assert plateau_with([5] * 6, patience=1, min_lr=0.3) == [1, 1, 0.5, 0.3, 0.3, 0.3]


def test_an_improvement_by_less_than_the_least_is_none():
    assert plateau_with([5, 4.95, 4.9], 3, patience=1, min_delta=0.2)[-1] == 0.5


def test_a_plateau_goes_on_counting_after_a_restart():
    first, second = ReduceLROnPlateau("loss", patience=3), ReduceLROnPlateau("loss", patience=3)
    first.attach(make_loop([]))
    for loss in (1.0, 1.0, 1.0):
        first(ff.Checkpoint(step=1, state=None, metrics={"loss": loss}))
    loop = make_loop([])
    second.attach(loop)
    second.set_state(first.get_state())
    second(ff.Checkpoint(step=4, state=None, metrics={"loss": 1.0}))
    assert loop.hyperparams["learning_rate"] == pytest.approx(0.1)


def test_each_group_is_lowered_by_itself_or_all_together():
    optimizer = ff.optim.MultiOptimizer(
        ("w", ff.optim.OptimizerDef(optax.sgd, learning_rate=1.0)),
        ("b", ff.optim.OptimizerDef(optax.sgd, learning_rate=0.5)),
    )
    one = ReduceLROnPlateau("loss", factor=0.1, patience=1, group="b")
    loop = make_loop(one, optimizer, n_steps=2)
    list(loop)
    assert loop.hyperparams["w"]["learning_rate"] == 1.0
    assert loop.hyperparams["b"]["learning_rate"] == pytest.approx(0.05)
    both = ReduceLROnPlateau("loss", factor=0.1, patience=1)
    loop = make_loop(both, optimizer, n_steps=3)
    checkpoint = list(loop)[-1]
    assert checkpoint.metrics["learning_rate/w"] == pytest.approx(0.1)
    assert checkpoint.metrics["learning_rate/b"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    "callback", [ReduceLROnPlateau("loss"), LearningRateScheduler(lambda step, rate: rate)]
)
def test_an_optimizer_whose_rate_cannot_be_set_is_refused_at_once(callback):
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    for optimizer in optax.contrib.dadapt_adamw(0.1), optax.sgd(schedule):
        with pytest.raises(ValueError, match=r"cannot set the learning rate.*OptimizerDef"):
            make_loop(callback, optimizer)


def test_an_optimizer_with_a_schedule_is_refused_at_once():
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    optimizer = ff.optim.OptimizerDef(optax.sgd, learning_rate=schedule)
    for callback in ReduceLROnPlateau("loss"), LearningRateScheduler(lambda epoch: 0.1):
        with pytest.raises(ValueError, match=r"made with a schedule.*optax.adam\(1e-3\)"):
            make_loop(callback, optimizer)


@pytest.mark.parametrize("options", [{"factor": 2}, {"patience": -1}, {"min_lr": -0.1}])
def test_wrong_options_of_a_plateau_are_refused(options):
    with pytest.raises(ValueError, match=str(next(iter(options.values())))):
        ReduceLROnPlateau(**options)


def test_without_a_loop_they_say_where_they_belong():
    scheduler = LearningRateScheduler(lambda step, rate: rate)
    with pytest.raises(ValueError, match="callbacks of a loop"):
        scheduler(ff.Checkpoint(step=1, state=None, metrics={}))


def test_a_group_is_meant_by_its_position_as_in_the_loop():
    """Whatever the alphabet says, and though another group holds no rate."""
    groups = ff.optim.MultiOptimizer(
        ("w", ff.optim.OptimizerDef(optax.sgd, learning_rate=1.0)),
        ("b", ff.optim.OptimizerDef(optax.sgd, learning_rate=1.0)),
    )
    loop = make_loop(LearningRateScheduler(lambda step, rate: 0.5, group=0), groups)
    next(loop)
    assert loop.hyperparams == {"w": {"learning_rate": 0.5}, "b": {"learning_rate": 1.0}}
    assert list(loop.hyperparams) == ["w", "b"]

    plain_first = ff.optim.MultiOptimizer(
        ("w", optax.sgd(1.0)), ("b", ff.optim.OptimizerDef(optax.sgd, learning_rate=1.0))
    )
    with pytest.raises(ValueError, match="holds none in group 0"):
        next(make_loop(LearningRateScheduler(lambda step, rate: 0.5, group=0), plain_first))
    with pytest.raises(ValueError, match=r"no group 5(.|\n)*'w', 'b'"):
        next(make_loop(ReduceLROnPlateau("loss", group=5), plain_first))


def test_groups_within_groups_have_their_rates_set_and_reported():
    inner = ff.optim.MultiOptimizer(("w", ff.optim.OptimizerDef(optax.sgd, learning_rate=1.0)))
    outer = ff.optim.MultiOptimizer((".*", inner))
    loop = make_loop(LearningRateScheduler(lambda step, rate: 0.5 * rate, group=".*"), outer)
    assert next(loop).metrics["learning_rate/w"] == 0.5
    assert next(loop).metrics["learning_rate/w"] == 0.25


@pytest.mark.slow
def test_a_checkpoint_file_holds_the_rate_that_was_set_at_it(tmp_path):
    """A run that is killed right after it continues as the whole one does."""

    def make(folder, init=None):
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


def test_a_rate_is_set_beside_a_callback_that_keeps_less_of_the_state():
    def keep_less(checkpoint):
        return checkpoint.replace(state=checkpoint.state.for_inference())

    schedule = LearningRateScheduler(lambda step, rate: 0.1 * (step + 1))
    assert rates_of(make_loop([schedule, keep_less], n_steps=3)) == [0.1, 0.2, 0.3]


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


def test_a_metric_that_never_was_finite_lowers_the_rate(capsys):
    assert plateau_with([np.nan] * 3, 3, patience=1)[-1] == 0.25
    assert "val_loss never was finite, learning rate lowered to 0.5" in capsys.readouterr().err
