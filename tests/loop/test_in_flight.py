"""How many dispatches may be unfinished."""

import pytest

from flaxfit.loop._in_flight import InFlight


class Devices:
    """Devices that take some time for each dispatch; the host takes none."""

    def __init__(self, seconds=0.0):
        self.seconds, self.now, self.idle_from, self.ends = seconds, 0.0, 0.0, []

    def clock(self):
        return self.now

    def dispatch(self):
        """What a dispatch returns."""
        self.idle_from = max(self.idle_from, self.now) + self.seconds
        self.ends.append(self.idle_from)
        return Result(self, self.idle_from)

    def unfinished(self):
        return sum(end > self.now for end in self.ends)


class Result:
    """What a dispatch returns; to wait for it takes until the devices have finished it."""

    def __init__(self, devices, end):
        self.devices, self.end, self.is_awaited = devices, end, False

    def block_until_ready(self):
        self.is_awaited = True
        self.devices.now = max(self.devices.now, self.end)
        return self


def awaited(in_flight, n, devices, *, reports=True):
    """The dispatches that are waited for, of `n`."""
    results = [devices.dispatch() for _ in range(n)]
    for result in results:
        in_flight.add({"float32": result} if reports else {}, [] if reports else [result])
    return [i for i, result in enumerate(results) if result.is_awaited]


def unfinished(in_flight, n, devices):
    """How many dispatches are unfinished after each of `n`."""
    counts = []
    for _ in range(n):
        in_flight.add({"float32": devices.dispatch()}, [])
        counts.append(devices.unfinished())
    return counts


def test_two_dispatches_may_be_unfinished_on_a_cpu_with_several_devices():
    devices = Devices()
    assert awaited(InFlight("cpu", 8, clock=devices.clock), 5, devices) == [0, 1, 2]
    devices = Devices(seconds=1e-6)
    assert max(unfinished(InFlight("cpu", 8, clock=devices.clock), 50, devices)) == 2


@pytest.mark.parametrize("kind", [("cpu", 1), ("gpu", 1), ("gpu", 8)])
def test_elsewhere_fewer_than_24_are_unfinished_and_one_in_eight_is_waited_for(kind):
    devices = Devices(seconds=1e-3)
    in_flight = InFlight(*kind, clock=devices.clock)
    assert max(unfinished(in_flight, 100, devices)) == 23
    first, *others = awaited(in_flight, 80, devices)
    assert first < 8 and others == [*range(first + 8, others[-1] + 1, 8)]


@pytest.mark.parametrize("n_bytes, most", [(1, 23), (2**24, 5), (2**25, 2), (2**40, 2)])
def test_batches_of_unfinished_dispatches_take_bounded_memory(n_bytes, most):
    devices = Devices(seconds=1e-3)
    in_flight = InFlight("gpu", 1, clock=devices.clock)
    in_flight.expect(n_bytes)
    assert max(unfinished(in_flight, 100, devices)) == most


@pytest.mark.parametrize("seconds", [0.01, 0.03, 0.1, 0.16, 0.2, 1.0, 5.0])
def test_the_host_is_at_most_half_a_second_or_two_dispatches_ahead(seconds):
    devices = Devices(seconds)
    in_flight = InFlight("gpu", 1, clock=devices.clock)
    assert max(unfinished(in_flight, 100, devices)) * seconds <= max(0.5, 2 * seconds)


def test_steps_that_become_slower_are_soon_waited_for():
    devices = Devices(seconds=1e-3)
    in_flight = InFlight("gpu", 1, clock=devices.clock)
    unfinished(in_flight, 50, devices)
    devices.seconds = 1.0
    assert unfinished(in_flight, 60, devices)[-1] == 2


def test_steps_that_report_nothing_are_waited_for_themselves():
    in_flight = InFlight("cpu", 1)
    assert awaited(in_flight, 3, Devices(), reports=False) == [0, 1, 2]
