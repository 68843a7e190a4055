"""Profiler: a trace of the steps that were asked for, and nothing else."""

import gzip
import json

import jax
import pytest
from loops import make_weight_loop

from flaxfit.callbacks import Profiler


@pytest.fixture
def traces(monkeypatch):
    """The steps after which traces began and ended; the profiler itself does nothing."""
    steps = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: steps.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: steps.append("stop"))
    return steps


def watched(profiler, traces, **options):
    """A loop that notes its steps among the traces."""
    loop = make_loop(profiler, **options)
    loop.dispatch_watchers.append(traces.append)
    return loop


def make_loop(profiler, **options):
    return make_weight_loop([profiler], **{"n_steps": 12, "n_steps_per_checkpoint": 12, **options})


@pytest.mark.slow
def test_a_trace_of_some_steps_is_written(tmp_path):
    list(make_loop(Profiler(tmp_path, 3, 5)))
    (path,) = tmp_path.glob("**/*.trace.json.gz")
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_the_trace_is_of_these_steps(traces):
    list(watched(Profiler("runs", 3, 5), traces, n_steps=7))
    assert traces == [1, "start", 2, 3, 4, "stop", 5, 6, 7]


def test_a_trace_from_the_first_step_begins_before_it(traces):
    list(watched(Profiler("runs", 1, 2), traces, n_steps=3))
    assert traces == ["start", 1, "stop", 2, 3]


def test_a_trace_ends_with_training(traces):
    list(watched(Profiler("runs", 3, 50), traces, n_steps=4))
    assert traces == [1, "start", 2, 3, 4, "stop"]


def test_steps_that_are_taken_together_are_traced_together(traces):
    list(watched(Profiler("runs", 6, 7), traces, first_checkpoint=12, steps_per_call=4))
    assert traces == ["start", 4, "stop", 8, 12]  # Steps 5 to 8.


@pytest.mark.slow
def test_another_trace_does_not_stop_training(tmp_path, capsys):
    jax.profiler.start_trace(tmp_path / "other")
    try:
        assert len(list(make_loop(Profiler(tmp_path, 3, 5)))) == 2
    finally:
        jax.profiler.stop_trace()
    assert capsys.readouterr().err.count("Profiler failed") == 1


@pytest.mark.parametrize("steps", [(0, 3), (5, 4)])
def test_steps_that_are_none_are_refused(steps):
    with pytest.raises(ValueError, match="1 <= first <= last"):
        Profiler("runs", *steps)
