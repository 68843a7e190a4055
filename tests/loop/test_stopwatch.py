"""The time that is spent in blocks."""

from types import SimpleNamespace

import pytest

from flaxfit.loop import _stopwatch
from flaxfit.loop._stopwatch import Stopwatch


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets; returns the list of its times, of which the last one is now."""
    times = [0.0]
    monkeypatch.setattr(_stopwatch, "time", SimpleNamespace(perf_counter=lambda: times[-1]))
    return times


def test_blocks_add_up_and_nested_ones_count_once(clock):
    watch = Stopwatch()
    with watch:
        clock.append(2.0)
        with watch:
            clock.append(3.0)
            assert watch.is_running and watch.seconds == 3
        assert watch.is_running
        clock.append(4.0)
    clock.append(9.0)
    assert not watch.is_running and watch.seconds == 4
    with pytest.raises(KeyError), watch:
        clock.append(10.0)
        raise KeyError
    assert not watch.is_running and watch.seconds == 5


def test_a_reset_within_a_block_restarts_it(clock):
    watch = Stopwatch()
    with watch:
        clock.append(2.0)
        watch.reset()
        clock.append(5.0)
    assert watch.seconds == 3
