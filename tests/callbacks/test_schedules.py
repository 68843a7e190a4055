import copy
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


def test_only_checkpoints_of_divisible_steps_reach_the_callback(checkpoint_at):
    recorder = Recorder()
    callback = every(10, recorder)
    changed = [callback(checkpoint_at(step, loss=1.0)) for step in (5, 10, 15, 20)]
    assert recorder.events == [10, 20]
    assert ["seen" in checkpoint.metrics for checkpoint in changed] == [False, True, False, True]


@pytest.mark.parametrize(
    ("n", "expected"), [(100, [101, 201, 300]), (150, [201, 300]), (40, [101, 201, 300])]
)
def test_a_multiple_between_two_checkpoints_is_due_at_the_second(n, expected, checkpoint_at):
    recorder = Recorder()
    for step, n_new in (1, 1), (101, 100), (201, 100), (300, 99):  # The loop's default grid.
        every(n, recorder)(checkpoint_at(step, n_completed_steps=n_new, loss=1.0))
    assert recorder.events == expected


def test_a_callback_that_returns_none_leaves_the_checkpoint_as_it_is(checkpoint_at):
    checkpoint = checkpoint_at(10, loss=1.0)
    assert every(10, lambda checkpoint: None)(checkpoint) is checkpoint


def test_attach_and_close_are_forwarded_where_the_callback_has_them(make_loop):
    recorder = Recorder()
    callback = every(2, every(3, recorder))
    callback.attach(make_loop())
    callback.close()
    assert recorder.events == ["attach", "close"]
    assert not hasattr(every(2, lambda checkpoint: None), "attach")
    assert not hasattr(every(2, lambda checkpoint: None), "close")


def test_a_callback_of_some_checkpoints_can_be_copied(checkpoint_at):
    callback = copy.deepcopy(every(2, StopOnNaN()))
    assert callback(checkpoint_at(2, loss=1.0)).loss == 1.0


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_a_number_of_steps_below_one_or_not_whole_is_refused(n):
    with pytest.raises(ValueError, match="at least 1, got"):
        every(n, Recorder())


@pytest.mark.parametrize("schedule", [every(2), at(2), when(bool)])
def test_something_that_cannot_be_called_is_refused(schedule):
    name: Any = "save"
    with pytest.raises(TypeError, match="callable of a checkpoint, got 'save'"):
        schedule(name)


def test_a_callback_runs_when_seconds_have_passed_since_it_last_ran(checkpoint_at):
    times = iter([0.0, 4.0, 10.5, 15.0, 20.0, 20.5])
    recorder = Recorder()
    callback = every(seconds=10, callback=recorder, clock=lambda: next(times))
    for step in range(1, 7):
        callback(checkpoint_at(step, loss=1.0))
    assert recorder.events == [1, 3, 6]


@pytest.mark.parametrize("options", [{}, {"n": 1, "seconds": 1.0}, {"seconds": 0}])
def test_a_schedule_has_either_steps_or_seconds(options):
    with pytest.raises(ValueError, match="every needs"):
        every(callback=Recorder(), **options)


def test_steps_between_checkpoints_count_at_the_next_checkpoint(checkpoint_at):
    recorder = Recorder()
    callback = at(0, 1, 7, 8, 12)(recorder)
    for step in (1, 6, 11, 16, 21):
        callback(checkpoint_at(step, n_completed_steps=1 if step == 1 else 5, loss=1.0))
    assert recorder.events == [1, 11, 16]


@pytest.mark.parametrize("steps", [(), (-1,), ("1",)])
def test_at_needs_steps(steps):
    with pytest.raises(ValueError, match="at needs one or more steps"):
        at(*steps)


def test_a_predicate_chooses_the_checkpoints(checkpoint_at):
    recorder = Recorder()

    @when(lambda checkpoint: checkpoint.loss < 0.5)
    def record(checkpoint):
        return recorder(checkpoint)

    changed = [record(checkpoint_at(step, loss=1 / step)) for step in (1, 2, 3)]
    assert recorder.events == [3] and "seen" in changed[2].metrics
    with pytest.raises(TypeError, match="when needs a function"):
        when(0.5)


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
