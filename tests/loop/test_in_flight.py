"""How many dispatches may be unfinished."""

import numpy as np
import pytest

from flaxfit.loop._in_flight import InFlight


class Result:
    """What a dispatch returns; records that it was waited for."""

    def __init__(self, is_finished=False):
        self.is_awaited, self._is_finished = False, is_finished

    def is_ready(self):
        return self._is_finished

    def block_until_ready(self):
        self.is_awaited = True
        return self


def awaited(in_flight, n, *, reports=True):
    results = [Result() for _ in range(n)]
    for result in results:
        in_flight.add({"float32": result} if reports else {}, [] if reports else [result])
    return [i for i, result in enumerate(results) if result.is_awaited]


def test_two_dispatches_may_be_unfinished():
    assert awaited(InFlight("cpu"), 5) == [0, 1, 2]


def test_with_resident_data_each_eighth_dispatch_waits():
    in_flight = InFlight("cpu")
    in_flight.set_resident(True)
    assert awaited(in_flight, 40) == [7, 15]


def test_steps_that_report_nothing_are_waited_for_themselves():
    in_flight = InFlight("cpu")
    assert awaited(in_flight, 3, reports=False) == [0, 1, 2] and [*in_flight] == []
    in_flight.set_resident(True)
    assert len(awaited(in_flight, 16, reports=False)) == 2


class Clock:
    """Stands still until it is set."""

    now = 0.0

    def __call__(self):
        return self.now


BATCH = {"x": np.zeros(2**24, np.uint8)}


def dispatched(in_flight, n, batch=BATCH, *, is_finished=False):
    results = [Result(is_finished) for _ in range(n)]
    for result in results:
        in_flight.expect(batch)
        in_flight.add({"float32": result}, [])
    return results


@pytest.mark.parametrize("is_resident", [False, True])
def test_an_accelerator_may_be_behind_by_many_small_dispatches(is_resident):
    in_flight = InFlight("gpu", Clock())
    in_flight.set_resident(is_resident)
    results = dispatched(in_flight, 1000, {"index": np.zeros(8, np.int32)})
    assert not any(each.is_awaited for each in results)
    assert len([*in_flight]) == 1000


def test_the_batches_that_wait_for_an_accelerator_are_bounded_in_bytes():
    in_flight = InFlight("gpu", Clock())
    results = dispatched(in_flight, 20)
    assert [each.is_awaited for each in results] == [True] * 4 + [False] * 16
    assert [*in_flight] == results[4:]


def test_an_accelerator_is_behind_by_a_fraction_of_a_second():
    clock = Clock()
    in_flight = InFlight("tpu", clock)
    first = dispatched(in_flight, 3)
    clock.now = 0.2
    second = dispatched(in_flight, 3)
    assert not any(each.is_awaited for each in first + second)
    clock.now = 0.4
    dispatched(in_flight, 1)
    assert [each.is_awaited for each in first + second] == [True] * 3 + [False] * 3


def test_two_slow_dispatches_of_large_batches_may_be_unfinished_everywhere():
    clock = Clock()
    in_flight = InFlight("gpu", clock)
    large = {"x": np.zeros(2**29, np.uint8)}
    for i in range(3):
        clock.now = 10.0 * i
        dispatched(in_flight, 1, large)
    assert len([*in_flight]) == 2


def test_finished_dispatches_count_no_bytes():
    in_flight = InFlight("gpu", Clock())
    dispatched(in_flight, 100, is_finished=True)
    assert len([*in_flight]) == 1
    waiting = dispatched(in_flight, 15)
    assert not any(each.is_awaited for each in waiting)
