import dataclasses

import pytest

from flaxfit.loop._schedule import Schedule


def steps_of(schedule, n, last=None):
    """The steps that yield, of a run that goes from one to the next."""
    steps, step = [], 0
    for _ in range(n):
        steps.append(step := schedule.after(step, last))
    return steps


def test_checkpoints_are_evenly_spaced_from_the_first():
    assert steps_of(Schedule(), 3) == [1, 2, 3]
    assert steps_of(Schedule(first=1, every=5), 3) == [1, 6, 11]
    assert steps_of(Schedule(first=7, every=5), 3) == [7, 12, 17]


def test_the_last_step_yields_wherever_it_is():
    assert steps_of(Schedule(first=1, every=5, last=8), 3) == [1, 6, 8]
    assert steps_of(Schedule(first=9, every=5, last=8), 1) == [8]


def test_past_the_last_step_the_spacing_alone_counts():
    assert steps_of(Schedule(first=1, every=5, last=8), 5)[2:] == [8, 11, 16]
    assert Schedule(last=0).after(0) == 1


def test_another_last_step_may_be_given():
    schedule = Schedule(first=1, every=5, last=8)
    assert schedule.after(1, last=3) == 3
    assert schedule.after(6, last=99) == 11


def test_a_checkpoint_that_was_not_shown_yet_may_be_due_at_the_very_step():
    # The loop asks from the step before one whose checkpoint nobody has seen.
    assert Schedule(first=5, every=5).after(4) == 5


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"first": 0}, ValueError, "first_checkpoint must be 1 or more, got 0"),
        ({"every": 2.5}, TypeError, "n_steps_per_checkpoint must be an integer, got 2.5"),
        ({"last": -1}, ValueError, "n_steps must be 0 or more, got -1"),
    ],
)
def test_what_is_no_schedule_is_refused(change, error, match):
    with pytest.raises(error, match=match):
        dataclasses.replace(Schedule(), **change)
