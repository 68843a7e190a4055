"""Fixtures of the tests of callbacks: checkpoints made by hand, a loop and a terminal."""

import io

import pytest

from flaxfit import Checkpoint
from flaxfit.state._observers import Observers

FIELDS = ("n_completed_steps", "elapsed_time", "stop")


class FakeLoop:
    """The part of a training loop that callbacks use, without training."""

    def __init__(self, n_steps=None, n_steps_per_checkpoint=1, step=0, state=None):
        self.n_steps, self.n_steps_per_checkpoint = n_steps, n_steps_per_checkpoint
        self.step, self.state = step, state
        self.callbacks, self.fit_call, self.on = (), None, Observers()
        self.restored = []
        self.metrics = {"loss": 0.5}
        self.n_reads = 0

    def restore(self, state):
        self.state = state
        self.restored.append(state)

    def running_metrics(self):
        self.n_reads += 1
        return self.metrics

    def dispatch(self):
        self.step += 1
        for watch in (*self.on.after_step, *self.on.after_dispatch):
            watch(self.step)


class FakeTerminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self):
        return True


class Clock:
    """A clock that a test turns on."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make_loop():
    return FakeLoop


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    return FakeTerminal()


@pytest.fixture
def checkpoint_at():
    """Makes a checkpoint of a step from fields and metrics given by name."""

    def make(step, *, state=None, **given):
        fields = {name: given.pop(name) for name in FIELDS if name in given}
        return Checkpoint(step=step, state=state, metrics=given, **fields)

    return make
