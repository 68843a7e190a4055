"""How many dispatches may be unfinished."""

import pytest

from flaxfit.loop._in_flight import InFlight


class Result:
    """What a dispatch returns; records that it was waited for."""

    def __init__(self):
        self.is_awaited = False

    def block_until_ready(self):
        self.is_awaited = True
        return self


def awaited(in_flight, n, *, reports=True):
    results = [Result() for _ in range(n)]
    for result in results:
        in_flight.add({"float32": result} if reports else {}, [] if reports else [result])
    return [i for i, result in enumerate(results) if result.is_awaited]


def test_two_dispatches_may_be_unfinished_on_a_cpu_with_several_devices():
    assert awaited(InFlight("cpu", 8), 5) == [0, 1, 2]


@pytest.mark.parametrize("devices", [("cpu", 1), ("gpu", 1), ("gpu", 8)])
def test_elsewhere_some_at_once_are_waited_for_where_24_are_unfinished(devices):
    assert awaited(InFlight(*devices), 24) == []
    assert awaited(InFlight(*devices), 32) == [6, 13]


@pytest.mark.parametrize("n_bytes, most", [(1, 24), (2**24, 8), (2**25, 4), (2**40, 2)])
def test_batches_of_unfinished_dispatches_take_bounded_memory(n_bytes, most):
    in_flight = InFlight("gpu", 1)
    in_flight.expect(n_bytes)
    unfinished = []
    for _ in range(40):
        awaited(in_flight, 1)
        unfinished.append(len([*in_flight]))
    assert max(unfinished) == most


def test_the_host_is_at_most_half_a_second_ahead():
    seconds = [0.0, 0.1, 0.2, 0.61, 5.0]
    in_flight = InFlight("gpu", 1, clock=iter(seconds).__next__)
    unfinished = []
    for _ in seconds:
        awaited(in_flight, 1)
        unfinished.append(len([*in_flight]))
    assert unfinished == [1, 2, 3, 2, 2]


def test_steps_that_report_nothing_are_waited_for_themselves():
    in_flight = InFlight("cpu", 1)
    assert awaited(in_flight, 3, reports=False) == [0, 1, 2] and [*in_flight] == []
