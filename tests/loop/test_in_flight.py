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
    """The dispatches that are waited for, of `n`."""
    results = [Result() for _ in range(n)]
    for result in results:
        in_flight.add({"float32": result} if reports else {}, [] if reports else [result])
    return [i for i, result in enumerate(results) if result.is_awaited]


def unfinished(in_flight, n):
    """After each of `n` dispatches, how many come after the latest that was waited for."""
    results, counts = [], []
    for _ in range(n):
        results.append(Result())
        in_flight.add({"float32": results[-1]}, [])
        done = [i for i, result in enumerate(results) if result.is_awaited]
        counts.append(len(results) - max(done, default=-1) - 1)
    return counts


def at_rest():
    """A clock that stands still."""
    return 0.0


def test_two_dispatches_may_be_unfinished_on_a_cpu_with_several_devices():
    assert awaited(InFlight("cpu", 8), 5) == [0, 1, 2]


@pytest.mark.parametrize("devices", [("cpu", 1), ("gpu", 1), ("gpu", 8)])
def test_elsewhere_fewer_than_24_are_unfinished_and_one_in_eight_is_waited_for(devices):
    assert awaited(InFlight(*devices, clock=at_rest), 16) == []
    assert awaited(InFlight(*devices, clock=at_rest), 40) == [0, 8, 16]
    assert max(unfinished(InFlight(*devices, clock=at_rest), 100)) == 23


@pytest.mark.parametrize("n_bytes, most", [(1, 23), (2**24, 5), (2**25, 2), (2**40, 2)])
def test_batches_of_unfinished_dispatches_take_bounded_memory(n_bytes, most):
    in_flight = InFlight("gpu", 1, clock=at_rest)
    in_flight.expect(n_bytes)
    assert max(unfinished(in_flight, 40)) == most


def test_the_host_is_at_most_half_a_second_ahead():
    seconds = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 5.0, 10.0, 15.0]
    in_flight = InFlight("gpu", 1, clock=iter(seconds).__next__)
    assert unfinished(in_flight, 9) == [1, 2, 3, 4, 4, 5, 4, 3, 2]


def test_steps_that_report_nothing_are_waited_for_themselves():
    in_flight = InFlight("cpu", 1)
    assert awaited(in_flight, 3, reports=False) == [0, 1, 2]
