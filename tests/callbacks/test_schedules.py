import copy
import functools
from typing import Any

import pytest
import redex.combinator as cb

from flaxfit.callbacks import (
    CSVLogger,
    EarlyStopping,
    JSONLogger,
    ProgressBar,
    StopOnNaN,
    SummaryLogger,
    at,
    every,
    when,
)


class Recorder:
    """A callback with everything a callback may have."""

    def __init__(self):
        self.events = []

    def __call__(self, checkpoint):
        self.events.append(checkpoint.step)
        return checkpoint.with_metrics({"seen": 1.0})

    def attach(self, loop):
        self.events.append("attach")

    def close(self):
        self.events.append("close")


@pytest.mark.parametrize(
    ("n", "expected"), [(100, [101, 201, 300]), (150, [201, 300]), (40, [101, 201, 300])]
)
def test_a_multiple_between_two_checkpoints_is_due_at_the_second(n, expected, checkpoint_at):
    recorder = Recorder()
    for step, n_new in (1, 1), (101, 100), (201, 100), (300, 99):  # The loop's default grid.
        every(n, recorder)(checkpoint_at(step, n_completed_steps=n_new, loss=1.0))
    assert recorder.events == expected


def test_the_checkpoint_is_what_the_callback_returns_if_anything(checkpoint_at):
    checkpoint = checkpoint_at(10, loss=1.0)
    assert every(10, lambda checkpoint: None)(checkpoint) is checkpoint
    assert "seen" in every(10, Recorder())(checkpoint).metrics


def test_attach_and_close_are_forwarded_where_the_callback_has_them(make_loop):
    recorder = Recorder()
    callback = every(2, every(3, recorder))
    callback.attach(make_loop())
    callback.close()
    assert recorder.events == ["attach", "close"]
    bare = every(2, lambda checkpoint: None)
    assert not hasattr(bare, "attach") and not hasattr(bare, "close")


def test_a_callback_of_some_checkpoints_can_be_copied(checkpoint_at):
    callback = copy.deepcopy(every(2, StopOnNaN()))
    assert callback(checkpoint_at(2, loss=1.0)).loss == 1.0


@pytest.mark.parametrize(
    ("schedule", "arguments", "words"),
    [
        (every, (0,), "every needs a number of steps of at least 1, got"),
        (every, (1.5,), "every needs a number of steps of at least 1, got"),
        (every, (True,), "every needs a number of steps of at least 1, got"),
        (every, (), "every needs either n or seconds"),
        (functools.partial(every, seconds=1.0), (1,), "every needs either n or seconds"),
        (functools.partial(every, seconds=0), (), "every needs a positive number of seconds"),
        (at, (), "at needs one or more steps"),
        (at, (-1,), "at needs one or more steps"),
        (at, ("1",), "at needs one or more steps"),
    ],
)
def test_what_is_no_schedule_is_refused(schedule, arguments, words):
    with pytest.raises(ValueError, match=words):
        schedule(*arguments)


def test_something_that_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="when needs a function"):
        when(0.5)
    name: Any = "save"
    for schedule in every(2), at(2), when(bool):
        with pytest.raises(TypeError, match="callable of a checkpoint, got 'save'"):
            schedule(name)


def test_a_callback_runs_when_seconds_have_passed_since_it_last_ran(checkpoint_at):
    times = iter([0.0, 4.0, 10.5, 15.0, 20.0, 20.5])
    recorder = Recorder()
    callback = every(seconds=10, callback=recorder, clock=lambda: next(times))
    for step in range(1, 7):
        callback(checkpoint_at(step, loss=1.0))
    assert recorder.events == [1, 3, 6]


def test_steps_between_checkpoints_count_at_the_next_checkpoint(checkpoint_at):
    recorder = Recorder()
    callback = at(0, 1, 7, 8, 12)(recorder)
    for step in (1, 6, 11, 16, 21):
        callback(checkpoint_at(step, n_completed_steps=1 if step == 1 else 5, loss=1.0))
    assert recorder.events == [1, 11, 16]


def test_all_built_in_callbacks_compose_in_series(checkpoint_at, tmp_path, capsys):
    callbacks = [
        every(2, Recorder()),
        SummaryLogger(),
        ProgressBar(),
        EarlyStopping("loss"),
        StopOnNaN(),
        CSVLogger(tmp_path / "log.csv"),
        JSONLogger(tmp_path / "log.jsonl"),
    ]
    together: Any = cb.serial(*callbacks)
    assert together(checkpoint_at(2, loss=0.5)).metrics == {"loss": 0.5, "seen": 1.0}
    assert together(checkpoint_at(3, loss=0.6)).stop
    for callback in callbacks:
        if hasattr(callback, "close"):
            callback.close()
