"""Interrupts of a TrainLoop lose nothing, and `finish` ends it early."""

import functools
import itertools
import signal
import threading

import jax
import pytest
from loops import OPTIMIZER, Regressor, X, Y, assert_equal, make_loop, make_weight_loop

import flaxfit as ff

ONE = ff.DataParallel(jax.devices()[:1])
one_weight = functools.partial(make_weight_loop, n_steps=None, strategy=ONE)

# Interrupts.


def test_an_interrupt_waits_until_the_batch_is_trained_on():
    pulled = itertools.count()

    def batches():
        for i in range(6):
            if next(pulled) == 3:
                signal.raise_signal(signal.SIGINT)
            yield X[i * 8 : i * 8 + 8], X[i * 8 : i * 8 + 8]

    loop = one_weight(data=batches(), n_steps_per_checkpoint=5, first_checkpoint=5)
    with pytest.raises(KeyboardInterrupt):
        next(loop)
    assert loop.step == 4 == int(loop.state.step)
    assert [c.step for c in loop] == [5, 6]
    whole = one_weight(data=[(X[i * 8 : i * 8 + 8], X[i * 8 : i * 8 + 8]) for i in range(6)])
    *_, last = whole
    assert_equal(last.state, loop.state)


def test_a_second_interrupt_is_not_held_back():
    def hung():
        yield X[:8], X[:8]
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("still waiting for the loader")

    loop = one_weight(data=hung())
    assert next(loop).step == 1
    with pytest.raises(KeyboardInterrupt):
        next(loop)
    assert loop.step == 1


def test_after_an_interrupted_callback_the_checkpoint_is_delivered_still():
    calls = []

    def interrupted(checkpoint):
        calls.append(checkpoint.step)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return checkpoint.with_metrics({"seen": 1.0})

    before = []
    loop = one_weight(n_steps=3, callbacks=[lambda c: before.append(c.step), interrupted])
    next(loop)
    with pytest.raises(KeyboardInterrupt):
        next(loop)
    rest = list(loop)
    assert [c.step for c in rest] == [2, 3] and rest[0].metrics["seen"] == 1.0
    assert before == [1, 2, 3] and calls == [1, 2, 2, 3]


def test_a_callback_of_fit_may_handle_interrupts_until_it_is_closed():
    class Handling:
        def __call__(self, checkpoint):
            if checkpoint.step == 2:
                self.before = signal.signal(signal.SIGINT, lambda *_: None)

        def close(self):
            signal.signal(signal.SIGINT, self.before)

    before = signal.getsignal(signal.SIGINT)
    model = ff.Model(Regressor(), OPTIMIZER, "mse", strategy=ONE)
    model.fit(X, Y, batch_size=32, epochs=2, verbose=0, callbacks=[Handling()])
    assert signal.getsignal(signal.SIGINT) is before


def test_a_loop_trains_in_another_thread():
    steps = []
    thread = threading.Thread(target=lambda: steps.extend(c.step for c in one_weight(n_steps=2)))
    thread.start()
    thread.join()
    assert steps == [1, 2]


def test_an_error_in_the_users_code_loses_nothing():
    loop, steps = one_weight(n_steps=4), []
    with pytest.raises(ZeroDivisionError):
        for checkpoint in loop:
            steps.append(checkpoint.step)
            if checkpoint.step == 2:
                _ = 1 / 0
    steps += [c.step for c in loop]
    assert steps == [1, 2, 3, 4]


# Ending early.


def finishing(loop, at):
    """The loop, told to finish by a watcher at a step."""
    loop.watchers.append(lambda step: loop.finish() if step == at else None)
    return loop


def test_finish_ends_with_the_step_that_is_being_taken():
    loop = finishing(one_weight(n_steps=40, n_steps_per_checkpoint=20), at=7)
    checkpoints = list(loop)
    assert [(c.step, c.stop) for c in checkpoints] == [(1, False), (7, True)]
    assert [c.n_completed_steps for c in checkpoints] == [1, 6]
    assert_equal(checkpoints[-1].state, list(one_weight(n_steps=7))[-1].state)
    assert list(loop) == []


def test_finish_is_honoured_by_run_until_and_may_be_gone_on_from():
    loop = finishing(one_weight(n_steps_per_checkpoint=50), at=7)
    assert [c.step for c in loop.run_until(20)] == [1, 7]
    assert [c.step for c in loop.run_until(20)] == [20]


@pytest.mark.slow
def test_finish_in_a_fit_ends_the_fit():
    class Finish:
        def attach(self, loop):
            finishing(loop, at=6)

        def __call__(self, checkpoint):
            return checkpoint

    model = ff.Model(Regressor(), OPTIMIZER, "mse", ["mae"], strategy=ONE)
    history = model.fit(X, Y, batch_size=16, epochs=5, callbacks=[Finish()], verbose=0)
    assert (model.step, history.steps) == (6, [4, 6])


def test_finish_in_a_callback_stops_with_its_checkpoint_and_in_the_for_at_once():
    loop = one_weight(n_steps=10)
    loop.callbacks = [lambda c: loop.finish() if c.step == 3 else None, lambda c: c]
    assert [(c.step, c.stop) for c in loop] == [(1, False), (2, False), (3, True)]
    loop.callbacks = None
    for _ in loop.run_until(10):
        loop.finish()
    assert loop.step == 4


@pytest.mark.slow
def test_finish_with_several_steps_per_call_ends_with_the_call_and_counts_its_examples():
    loop = make_loop(Regressor(0.2), n_steps=40, first_checkpoint=20, steps_per_call=4)
    finishing(loop, at=8)
    assert [(c.step, c.n_examples) for c in loop] == [(8, 8 * 16)]


def test_finish_outlives_an_exception_between_it_and_the_checkpoint():
    loop = finishing(one_weight(n_steps=10, first_checkpoint=10), at=3)

    def fail_once(step):
        loop.watchers.pop()
        raise RuntimeError("once")

    loop.watchers.append(lambda step: fail_once(step) if step == 3 else None)
    with pytest.raises(RuntimeError, match="once"):
        next(loop)
    assert [(c.step, c.stop) for c in loop] == [(3, True)]


def test_examples_are_counted_without_padding():
    x = X[:50]
    data = ff.ArrayStream(x, x, batch_size=16, epochs=2)
    options = {"first_checkpoint": 4, "n_steps_per_checkpoint": 4, "devices": jax.devices()}
    loop = make_weight_loop(data=data, n_steps=None, **options)
    assert [c.n_examples for c in loop] == [50, 50]
