"""Events: when functions are called, and with what; beside Keras's LambdaCallback."""

import itertools
import re

import flax.linen as nn
import numpy as np
import optax
import pytest
from loops import make_weight_loop

import flaxfit as ff
from flaxfit.callbacks import Events, every

x = np.ones((8, 1), np.float32)
EVENTS = [*itertools.product(("train", "epoch", "train_batch"), ("begin", "end"))]
NAMES = [f"on_{event}_{moment}" for event, moment in EVENTS]
AROUND_PASSES = ["on_test_begin", "on_test_end", "on_predict_begin", "on_predict_end"]


def recorder(calls, names):
    def record(name):
        def call(*arguments, **named):  # Keras names some.
            *number, logs = *arguments, *named.values()
            calls.append((name, *number, sorted(logs)))

        return call

    return {name: record(name) for name in names}


def test_events_of_a_loop_come_in_order_and_in_pairs():
    calls = []
    loop = make_weight_loop(n_steps=2, callbacks=Events(**recorder(calls, NAMES[:4])))
    names = sorted(list(loop)[-1].scalars)
    loop.close()
    assert calls == [
        ("on_train_begin", []),
        ("on_epoch_begin", 0, []),
        ("on_epoch_end", 0, names),
        ("on_epoch_begin", 1, []),
        ("on_epoch_end", 1, names),
        ("on_train_end", names),
    ]


def test_training_ends_where_a_step_fails():
    calls = []

    def fail(checkpoint):
        raise RuntimeError("here")

    events = Events(**recorder(calls, ["on_train_begin", "on_train_end"]))
    with pytest.raises(RuntimeError, match="here"), make_weight_loop([events, fail]) as loop:
        next(loop)
    assert [name for name, *_ in calls] == ["on_train_begin", "on_train_end"]


@pytest.mark.slow
def test_a_second_fit_and_a_resumed_one_count_their_epochs(tmp_path):
    calls = []
    events = Events(on_epoch_begin=lambda epoch, logs: calls.append(epoch))
    for epochs in (1, 3):
        model = ff.Model(nn.Dense(1), optax.sgd(0.1), "mse")
        model.fit(x, x, 4, epochs, callbacks=[events], verbose=0, checkpoint_dir=tmp_path)
    model.fit(x, x, 4, 2, callbacks=[events], verbose=0)
    model.fit(x, x, 4, 4, callbacks=[every(4, events)], verbose=0, initial_epoch=2)
    assert calls == [0, 1, 2, 0, 1, 2, 3]


def test_metrics_of_validation_are_those_of_a_test(checkpoint_at):
    calls = []
    events = Events(on_test_end=calls.append, on_epoch_end=lambda epoch, logs: calls.append(logs))
    for checkpoint in checkpoint_at(1, loss=1.0), checkpoint_at(2, loss=1.0, val_loss=2.0):
        assert events(checkpoint) is checkpoint
    assert calls == [{"loss": 1.0}, {"loss": 2.0}, {"loss": 1.0, "val_loss": 2.0}]


@pytest.mark.parametrize("steps_per_call", [1, "auto"])
def test_batches_are_counted_in_their_epoch_with_the_means_so_far(steps_per_call):
    ends, begins = [], []
    events = Events(
        on_train_batch_begin=lambda batch, logs: begins.append((batch, logs)),
        on_train_batch_end=lambda batch, logs: ends.append((batch, logs["loss"])),
    )
    options = {"n_steps": 4, "n_steps_per_checkpoint": 2, "first_checkpoint": 2}
    loop = make_weight_loop(events, steps_per_call=steps_per_call, **options)
    losses = [checkpoint.loss for checkpoint in loop]
    assert begins == [(batch, {}) for batch in (0, 1, 0, 1)]
    assert [batch for batch, _ in ends] == [0, 1, 0, 1]
    np.testing.assert_allclose([ends[1][1], ends[3][1]], losses, rtol=1e-6)


def test_several_steps_at_once_are_refused_for_events_of_batches():
    events = Events(on_train_batch_end=lambda batch, logs: None)
    with pytest.raises(ValueError, match="see every step, but 2 run per dispatch"):
        make_weight_loop(callbacks=events, steps_per_call=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_epoch_end": lambda checkpoint: None}, "called with (epoch, logs), got a function of"),
        ({"on_train_begin": lambda a, b: None}, "on_train_begin is called with (logs), got a func"),
        ({"on_train_batch_end": lambda logs: None}, "batch_end is called with (batch, logs)"),
        ({"on_train_end": 3}, "on_train_end is called with (logs), got 3, which is not a function"),
        ({"on_test_begin": lambda: None}, "on_test_begin is called with (logs), got a function of"),
        ({"on_predict_batch_end": print}, "no on_predict_batch_end: batches are not seen there"),
        ({"on_step": print}, "on_test_ and on_predict_ begin and end."),
        ({"on_epoch": print}, "has no on_epoch; it has on_epoch_, on_train_"),
    ],
)
def test_what_it_cannot_call_is_refused_in_words(options, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        Events(**options)


@pytest.mark.slow
def test_validation_evaluation_and_prediction_begin_and_end():
    calls, y = [], 3 * x
    events = Events(**recorder(calls, [*AROUND_PASSES, "on_epoch_end"]))
    model = ff.Model(nn.Dense(1), optax.sgd(0.1), "mse", ["mae"])
    model.fit(x, y, validation_data=(x, y), epochs=1, verbose=0, callbacks=[events])
    tested = [("on_test_begin", []), ("on_test_end", ["loss", "mae"])]
    assert [name for name, *_ in calls] == ["on_test_begin", "on_test_end", "on_epoch_end"]
    calls.clear()
    seen = []
    model.evaluate(x, y, verbose=0, callbacks=[events, lambda each: seen.append(each.metrics)])
    assert calls == tested and [sorted(each) for each in seen] == [["loss", "mae"]]
    calls.clear()
    model.predict(x, verbose=0, callbacks=[events])
    assert calls == [("on_predict_begin", []), ("on_predict_end", [])]


def test_the_validation_of_a_loop_begins_and_ends():
    calls = []
    evaluate = ff.EvalLoop(ff.EvalTask(lambda v, x, **_: x, ["mse"], (x, x)), name="val")
    events = Events(**recorder(calls, AROUND_PASSES))
    list(make_weight_loop(n_steps=2, callbacks=[evaluate, events]))
    assert calls == [("on_test_begin", []), ("on_test_end", ["mse"])] * 2


@pytest.mark.slow
def test_calls_are_those_of_keras(keras):
    layer = keras.layers.Dense(1)
    theirs, ours = [], []
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    arguments = {"batch_size": 4, "epochs": 3, "initial_epoch": 1, "verbose": 0}
    callback = keras.callbacks.LambdaCallback(**recorder(theirs, NAMES))
    model.fit(x, x, callbacks=[callback], **arguments)
    mine = ff.Model(nn.Dense(1), optax.sgd(0.1), "mse")
    mine.fit(x, x, callbacks=[Events(**recorder(ours, NAMES))], **arguments)
    assert [call[:-1] for call in ours] == [call[:-1] for call in theirs]
