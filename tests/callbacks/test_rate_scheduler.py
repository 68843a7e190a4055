"""LearningRateScheduler: what it counts, and how often it is called."""

import functools

import numpy as np
import optax
import pytest
from flax import linen as nn

import flaxfit as ff
from flaxfit.callbacks import LearningRateScheduler

X = np.ones((8, 1), np.float32)


@pytest.mark.parametrize(
    ("schedule", "unit"),
    [
        (lambda epoch: 0.1, "epoch"),
        (lambda epoch, lr: lr, "epoch"),
        (lambda ep, lr=0.5: lr, "epoch"),
        (lambda step, rate: rate, "step"),
        (lambda n_steps: 0.1, "step"),
        (functools.partial(lambda power, step: power**step, 0.5), "step"),
        (optax.cosine_decay_schedule(0.1, 10), "step"),
    ],
)
def test_the_name_of_the_argument_tells_what_is_counted(schedule, unit):
    assert LearningRateScheduler(schedule).unit == unit


def test_a_name_that_tells_nothing_needs_a_unit():
    with pytest.raises(TypeError, match=r"'i' .*counts epochs or steps: name it epoch or step"):
        LearningRateScheduler(lambda i, lr: lr)
    assert LearningRateScheduler(lambda i, lr: lr, unit="epoch").unit == "epoch"
    with pytest.raises(ValueError, match="unit must be 'epoch', 'step' or None, got 'batch'"):
        LearningRateScheduler(lambda i, lr: lr, unit="batch")


@pytest.mark.parametrize("schedule", [lambda: 0.1, lambda epoch, lr, logs: lr, 0.1])
def test_what_is_no_schedule_is_refused(schedule):
    with pytest.raises(TypeError, match=r"needs a function \(epoch\), \(epoch, lr\), \(step\)"):
        LearningRateScheduler(schedule)


def fit(model, schedule, epochs=1, first=0, **options):
    callback = LearningRateScheduler(schedule, **options)
    given = {"epochs": epochs, "initial_epoch": first, "batch_size": 4, "verbose": 0}
    return model.fit(X, X, callbacks=[callback], **given)


@pytest.fixture(scope="module")
def model():
    return ff.Model(nn.Dense(1), optax.sgd(0.5), "mse")


def test_epochs_are_counted_from_the_initial_one_in_each_fit_and_steps_go_on(model):
    epochs, steps, before = [], [], model.step
    for first in (0, 3):
        fit(model, lambda epoch: epochs.append(epoch) or 0.25, epochs=first + 2, first=first)
        fit(model, lambda step, rate: steps.append((step - before, rate)) or rate / 2)
    assert epochs == [0, 1, 3, 4]
    assert steps == [(4, 0.25), (10, 0.25)]


def test_the_rate_is_set_before_every_step_on_request(model):
    seen, first = [], model.step
    history = fit(model, lambda step: seen.append(step) or 2.0**-step, epochs=2, per_step=True)
    assert seen == [*range(first, first + 4)]
    assert history["learning_rate"] == [2.0 ** -(first + 1), 2.0 ** -(first + 3)]


def test_rates_per_step_need_steps_one_by_one(model):
    schedule = LearningRateScheduler(lambda step: 0.1, per_step=True)
    with pytest.raises(ValueError, match="remove steps_per_execution"):
        model.fit(X, X, callbacks=[schedule], steps_per_execution=2, verbose=0)
    with pytest.raises(ValueError, match="needs a function of the step"):
        LearningRateScheduler(lambda epoch: 0.1, per_step=True)


def test_it_says_what_it_sets_and_what_it_cannot(model, capsys):
    fit(model, lambda epoch: 0.25, verbose=1)
    assert "epoch 0: the learning rate is 0.25" in capsys.readouterr().err
    with pytest.raises(TypeError, match="returned None for epoch 0; expected a number"):
        fit(model, lambda epoch: None)


@pytest.mark.slow
def test_epochs_go_on_where_a_run_is_resumed(tmp_path):
    def run(epochs):
        model, seen = ff.Model(nn.Dense(1), optax.sgd(0.5), "mse"), []
        halve = LearningRateScheduler(lambda epoch, lr: seen.append((epoch, lr)) or lr / 2)
        model.fit(X, X, epochs=epochs, callbacks=[halve], checkpoint_dir=tmp_path, verbose=0)
        return seen

    assert run(2) == [(0, 0.5), (1, 0.25)]
    assert run(3) == [(2, 0.125)]
