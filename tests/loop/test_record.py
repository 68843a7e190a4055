"""What a checkpoint records of the steps before it."""

import functools
from types import SimpleNamespace

import jax
from loops import X, make_weight_loop

import flaxfit as ff
from flaxfit.loop import _stopwatch
from flaxfit.loop._consistency import Consistency
from flaxfit.loop._tally import Tally

loop_of = functools.partial(make_weight_loop, n_steps=None, devices=jax.devices()[:1])


def test_waiting_for_the_devices_is_time_of_training(monkeypatch):
    now, loop = [0.0], loop_of(n_steps_per_checkpoint=2)
    first = next(loop)
    monkeypatch.setattr(_stopwatch, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    read = Tally.metrics

    def wait_and_read(*arguments):
        now[0] += 60
        return read(*arguments)

    monkeypatch.setattr(Tally, "metrics", wait_and_read)
    assert first.elapsed_time < 60 <= next(loop).elapsed_time
    assert 60 <= next(loop).elapsed_time < 120


def test_the_next_epoch_is_shuffled_before_the_devices_are_waited_for(monkeypatch):
    done, shuffle, read = [], ff.ArrayStream.order_ahead, Tally.metrics

    def shuffle_and_note(stream):
        done.append("shuffled")
        return shuffle(stream)

    def read_and_note(*arguments):
        done.append("read")
        return read(*arguments)

    monkeypatch.setattr(ff.ArrayStream, "order_ahead", shuffle_and_note)
    monkeypatch.setattr(Tally, "metrics", read_and_note)
    stream = ff.ArrayStream(X, X, batch_size=16, shuffle=True)
    loop = loop_of(data=stream, n_steps_per_checkpoint=len(stream), first_checkpoint=len(stream))
    loop.next_checkpoint()
    assert done == ["shuffled", "read"]


def test_at_the_end_of_the_data_a_process_waits_for_what_it_dispatched(monkeypatch):
    waited = []

    def end(consistency, what, n, in_flight):
        waited.extend(jax.tree.leaves(in_flight))

    monkeypatch.setattr(Consistency, "end", end)
    list(loop_of(data=[(X, X)] * 3, n_steps_per_checkpoint=5, first_checkpoint=5))
    assert waited and all(isinstance(each, jax.Array) for each in waited)


def test_asking_for_the_cost_of_a_step_is_no_training():
    loop = loop_of()
    loop.step_flops()
    assert next(loop).elapsed_time >= 0
