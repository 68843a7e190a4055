"""When and on what `fit` validates."""

import itertools
import math
import re

import numpy as np
import optax
import pytest
from flax import linen as nn

import flaxfit as ff
from flaxfit.model._validation import epochs_of

X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)
BATCHES = [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 20, 4)]


def val_loss(data=(X, Y), epochs=4, model=None, **options):
    model = model or ff.Model(nn.Dense(1), optax.sgd(0.1), "mse")
    history = model.fit(X, Y, 8, epochs, **{"verbose": 0, "validation_data": data, **options})
    return history["val_loss"]


@pytest.mark.parametrize(("freq", "wanted"), [(2, [2, 4]), ([1, 4], [1, 4]), (range(2, 4), [2, 3])])
def test_epochs_are_validated_as_often_as_in_keras(freq, wanted):
    assert [epoch for epoch in range(1, 5) if epochs_of(freq)(epoch)] == wanted


def test_a_frequency_is_a_number_or_numbers():
    for wrong, error in ((0, ValueError), ("2", TypeError), (1.5, TypeError), ([0], ValueError)):
        with pytest.raises(error, match="validation_freq must be"):
            epochs_of(wrong)


@pytest.mark.slow
def test_callbacks_and_the_history_do_without_the_other_epochs():
    stopping = ff.callbacks.EarlyStopping("val_loss", patience=1)
    losses = val_loss(validation_freq=2, callbacks=[stopping])
    assert [math.isnan(loss) for loss in losses] == [True, False] * 2
    assert stopping.best_value == losses[3]


@pytest.mark.slow
def test_a_number_of_batches_is_measured_from_the_beginning_each_time():
    model = ff.Model(nn.Dense(1), optax.sgd(0.1), "mse")
    losses = val_loss(model=model, epochs=2, validation_steps=2, validation_batch_size=4)
    assert losses[-1] == pytest.approx(model.evaluate(X[:8], Y[:8])["loss"])


@pytest.mark.slow
def test_an_endless_generator_is_read_on_in_each_epoch_and_after_a_resume(tmp_path):
    wanted = val_loss(itertools.cycle(BATCHES), validation_steps=2)
    model = ff.Model(nn.Dense(1), optax.sgd(0.1), "mse")
    parts = [val_loss(BATCHES[:2], epochs=1, model=model)]
    for epoch, start in ((2, 2), (3, 4)):
        batches = [BATCHES[start % 5], BATCHES[(start + 1) % 5]]
        parts.append(val_loss(batches, epochs=epoch, model=model, initial_epoch=epoch - 1))
    assert wanted[:3] == pytest.approx(list(itertools.chain(*parts)))
    options = {"validation_steps": 2, "checkpoint_dir": tmp_path}
    val_loss(itertools.cycle(BATCHES), epochs=2, **options)
    assert val_loss(itertools.cycle(BATCHES), **options) == wanted


def test_a_generator_that_ends_too_early_is_refused():
    with pytest.raises(ValueError, match="only once, but is measured after 4 epochs"):
        val_loss(iter(BATCHES))
    with pytest.raises(ValueError, match="ended after 5 batches, 1 of the validation_steps=4"):
        val_loss(iter(BATCHES), validation_steps=4)
    assert math.isfinite(val_loss(iter(BATCHES), validation_freq=4)[-1])


def test_batches_have_a_size_of_their_own():
    with pytest.raises(ValueError, match="batch_size=2 cannot be applied to a list"):
        val_loss(BATCHES, validation_batch_size=2)
    assert len(val_loss(BATCHES, epochs=1)) == 1


@pytest.mark.parametrize(
    "options",
    [{"validation_steps": 3}, {"validation_batch_size": 4}, {"validation_freq": [2]}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_validation_need_data_to_validate_on(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=rf"fit got {name}={re.escape(repr(value))}, but neither"):
        val_loss(None, **options)
