"""Batches that are fetched ahead: none is lost, and the position is that of what was stepped."""

import numpy as np
import pytest

import flaxfit as ff
from flaxfit.loop._cursor import Cursor


def stream():
    return ff.ArrayStream(np.arange(8), batch_size=2, epochs=1)


def rows(source, n):
    return [source.examples(item)[0].tolist() for item in source.fetch(n)]


def test_what_was_fetched_comes_again_until_it_is_stepped():
    source = Cursor(stream())
    assert rows(source, 2) == rows(source, 2) == [[0, 1], [2, 3]]
    source.stepped(1)
    assert rows(source, 2) == [[2, 3], [4, 5]]
    assert not source.is_between_batches
    source.stepped(2)
    assert source.is_between_batches
    assert rows(source, 3) == [[6, 7]]


def test_the_position_is_that_behind_the_last_batch_that_was_stepped():
    source, alone = Cursor(stream()), stream()
    positions = [alone.get_state()] + [next(alone) and alone.get_state() for _ in range(4)]
    source.peek()
    assert source.position() == positions[0]
    source.fetch(3)
    source.stepped(1)
    assert source.position() == positions[1]
    assert source.stream_position() == positions[3]
    source.stepped(2)
    assert source.position() == positions[3]


def test_what_came_past_it_leaves_no_position_behind():
    source = Cursor(stream())
    source.peek()
    source.stepped(1)
    source.stream.next_rows_of(2)
    source.stepped(0)
    source.fetch_one()
    assert source.position() is None  # Rather than that of before.


def test_it_moves_to_a_position_and_forgets_what_it_has_fetched():
    source, other = Cursor(stream()), Cursor(stream())
    source.fetch(1)
    source.stepped(1)
    other.fetch(4)
    other.ended = True
    other.move_to(source.position())
    assert (other.ended, other.is_resumed, other.is_between_batches) == (False, True, True)
    assert rows(other, 1) == [[2, 3]]
    other.move_to(None)
    assert rows(other, 1) == [[2, 3]]


def test_an_iterator_comes_to_its_end_and_what_was_fetched_stays():
    source = Cursor(iter([np.zeros(2)]))
    (item,) = source.peek()
    assert not source.takes_rows
    with pytest.raises(StopIteration):
        source.fetch_one()
    assert source.fetch(2) == [item]


def test_without_data_there_is_nothing_to_fetch():
    source = Cursor(None)
    assert not source.has_data and source.position() is None
    with pytest.raises(ValueError, match=r"no data: give TrainTask\(data="):
        source.peek()
