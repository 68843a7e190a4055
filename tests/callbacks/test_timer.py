"""Timer: training ends within one step of the end of its budget."""

import numpy as np
import optax
import pytest
from flax import linen as nn
from loops import make_weight_loop

import flaxfit as ff
from flaxfit.callbacks import Timer

x = np.ones((8, 1), np.float32)


class Clock:
    """A clock that a loop moves on by a second per step."""

    def __init__(self):
        self.now = 0.0

    def __call__(self, checkpoint=None):
        return self.now if checkpoint is None else checkpoint

    def attach(self, loop):
        loop.watchers.append(self.tick)

    def tick(self, step):
        self.now += 1


def make_loop(callbacks=(), **options):
    return make_weight_loop(callbacks, **{"n_steps": 100, "n_steps_per_checkpoint": 50, **options})


def timed(*, seconds=None, n_steps=None):
    """A clock and a timer by it, as callbacks of a loop."""
    clock = Clock()
    return [clock, Timer(seconds, n_steps, clock=clock)]


def test_time_that_is_used_up_between_checkpoints_ends_training_there():
    checkpoints = list(make_loop(timed(seconds=7)))
    assert [(c.step, c.stop) for c in checkpoints] == [(1, False), (7, True)]


def test_steps_are_counted_from_when_the_timer_is_attached():
    loop = make_loop(n_steps_per_checkpoint=10)
    assert [c.step for c in loop.run(5)] == [1, 5]
    loop.callbacks = [Timer(n_steps=4)]
    assert [c.step for c in loop] == [9]


def test_time_that_callbacks_use_up_takes_no_further_step():
    clock, timer = timed(seconds=50)

    def evaluate(checkpoint):
        clock.now += 60

    loop = make_loop([evaluate, clock, timer])
    assert [(c.step, c.stop) for c in loop] == [(1, True)]


def test_what_was_used_before_a_resume_counts():
    first, second = (timed(seconds=7, n_steps=50) for _ in range(2))
    loop = make_loop(first)
    assert [c.step for c in loop.run(5)] == [1, 5]
    loop.callbacks = second
    for _ in range(2):  # A budget that is restored twice counts once.
        second[1].set_state(first[1].get_state())
    assert [c.step for c in loop] == [7]


@pytest.mark.parametrize("options", [{}, {"seconds": 0}, {"n_steps": 0}, {"seconds": -1.0}])
def test_a_timer_needs_a_budget(options):
    with pytest.raises(ValueError, match="Timer needs a"):
        Timer(**options)


@pytest.mark.slow
def test_fit_ends_with_the_budget():
    model = ff.Model(nn.Dense(1), optax.sgd(0.1), "mse")
    history = model.fit(x, 2 * x, batch_size=2, epochs=9, callbacks=[Timer(n_steps=6)], verbose=0)
    assert history.steps == [4, 6]
