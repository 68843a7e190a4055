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


def make_loop(profiler, **options):
    return make_weight_loop([profiler], **{"n_steps": 12, "n_steps_per_checkpoint": 12, **options})


@pytest.mark.slow
def test_a_trace_of_some_steps_is_written(tmp_path):
    list(make_loop(Profiler(tmp_path, 3, 5)))
    (path,) = tmp_path.glob("**/*.trace.json.gz")
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


@pytest.mark.parametrize(
    ("first", "last", "options", "expected"),
    [
        (3, 5, {"n_steps": 7}, [1, "start", 2, 3, 4, "stop", 5, 6, 7]),
        (1, 2, {"n_steps": 3}, ["start", 1, "stop", 2, 3]),
        (3, 50, {"n_steps": 4}, [1, "start", 2, 3, 4, "stop"]),  # It ends with training.
        # Steps 5 to 8 are taken together, and traced.
        (6, 7, {"first_checkpoint": 12, "steps_per_call": 4}, ["start", 4, "stop", 8, 12]),
    ],
)
def test_the_trace_is_of_these_steps(traces, first, last, options, expected):
    loop = make_loop(Profiler("runs", first, last), **options)
    loop.dispatch_watchers.append(traces.append)
    list(loop)
    assert traces == expected


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
