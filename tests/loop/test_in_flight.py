"""How many dispatches may be unfinished."""

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


def test_two_dispatches_may_be_unfinished():
    assert awaited(InFlight(), 5) == [0, 1, 2]


def test_with_resident_data_each_eighth_dispatch_waits():
    in_flight = InFlight()
    in_flight.set_resident(True)
    assert awaited(in_flight, 40) == [7, 15]


def test_steps_that_report_nothing_are_waited_for_themselves():
    in_flight = InFlight()
    assert awaited(in_flight, 3, reports=False) == [0, 1, 2] and [*in_flight] == []
    in_flight.set_resident(True)
    assert len(awaited(in_flight, 16, reports=False)) == 2
