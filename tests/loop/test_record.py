"""What a checkpoint records of the steps before it."""

from types import SimpleNamespace

from loops import make_loop

from flaxfit.loop import _stopwatch
from flaxfit.loop._tally import Tally


def test_waiting_for_the_devices_is_time_of_training(monkeypatch):
    now, loop = [0.0], make_loop(n_steps_per_checkpoint=2)
    first = next(loop)
    monkeypatch.setattr(_stopwatch, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    read = Tally.metrics

    def wait_and_read(*arguments):
        now[0] += 60
        return read(*arguments)

    monkeypatch.setattr(Tally, "metrics", wait_and_read)
    assert first.elapsed_time < 60 <= next(loop).elapsed_time
    assert 60 <= next(loop).elapsed_time < 120


def test_asking_for_the_cost_of_a_step_is_no_training():
    loop = make_loop()
    loop.step_flops()
    assert next(loop).elapsed_time >= 0
