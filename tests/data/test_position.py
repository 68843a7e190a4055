"""Positions of several processes, saved as one."""

import json

import numpy as np
import pytest

from flaxfit.data import _position, as_stream


@pytest.fixture
def as_process(monkeypatch):
    """Makes this process one of those that say these things."""

    def become(index, said):
        monkeypatch.setattr(_position, "process_count", lambda: len(said))
        monkeypatch.setattr(_position, "process_index", lambda: index)
        monkeypatch.setattr(_position, "exchange", lambda topic, value, seconds: said)

    return become


def test_positions_that_are_the_same_are_saved_as_one(as_process):
    as_process(0, [{"epoch": 1}] * 2)
    assert _position.joined_position({"epoch": 1}) == {"epoch": 1}
    as_process(1, [{}] * 3)
    assert _position.own_position({"epoch": 1}) == {"epoch": 1}


def test_each_process_goes_on_at_its_own_position(as_process):
    each = [{"next": 3}, {"next": 4}]
    as_process(0, each)
    saved = json.loads(json.dumps(_position.joined_position(each[0])))
    for index in (0, 1):
        as_process(index, each)
        assert _position.own_position(saved) == each[index]


def test_positions_of_another_number_of_processes_are_refused_by_data_not_by_weights(as_process):
    as_process(0, [{"delivered": 3}, {"delivered": 4}])
    saved = _position.joined_position(None)
    as_process(0, [None])
    assert _position.own_position(saved) == saved  # Readers of weights do not care.
    with pytest.raises(
        ValueError, match="with 1 process: each of 2 processes had read its own part"
    ):
        as_stream([np.zeros(3)]).set_state(saved)


def test_an_address_in_a_position_does_not_tell_processes_apart():
    first, second = ({"source": f"<Source object at 0x7f0{i}>"} for i in (1, 2))
    assert _position.position_text(first) == _position.position_text(second)
    assert _position.position_text({"next": 1}) != _position.position_text({"next": 2})
