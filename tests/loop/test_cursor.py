"""Batches that are fetched ahead: none is lost, and the position is that of what was stepped."""

import numpy as np
import pytest

import flaxfit as ff
from flaxfit.loop._cursor import Cursor


def stream():
    return ff.ArrayStream(np.arange(8), batch_size=2, epochs=1)


def rows(cursor, n):
    return [cursor.examples(item)[0].tolist() for item in cursor.fetch(n)]


def test_what_was_fetched_comes_again_until_it_is_stepped():
    cursor = Cursor(stream())
    assert rows(cursor, 2) == rows(cursor, 2) == [[0, 1], [2, 3]]
    cursor.stepped(1)
    assert rows(cursor, 2) == [[2, 3], [4, 5]]
    assert not cursor.is_between_batches
    cursor.stepped(2)
    assert cursor.is_between_batches
    assert rows(cursor, 3) == [[6, 7]]


def test_the_position_is_that_behind_the_last_batch_that_was_stepped():
    cursor, alone = Cursor(stream()), stream()
    positions = [alone.get_state()] + [next(alone) and alone.get_state() for _ in range(4)]
    cursor.peek()
    assert cursor.position() == positions[0]
    cursor.fetch(3)
    cursor.stepped(1)
    assert cursor.position() == positions[1]
    assert cursor.stream_position() == positions[3]
    cursor.stepped(2)
    assert cursor.position() == positions[3]


def test_it_moves_to_a_position_and_forgets_what_it_has_fetched():
    cursor, other = Cursor(stream()), Cursor(stream())
    cursor.fetch(1)
    cursor.stepped(1)
    other.fetch(4)
    other.ended = True
    other.move_to(cursor.position())
    assert (other.ended, other.is_resumed, other.is_between_batches) == (False, True, True)
    assert rows(other, 1) == [[2, 3]]
    other.move_to(None)
    assert rows(other, 1) == [[2, 3]]


def test_an_iterator_comes_to_its_end_and_what_was_fetched_stays():
    cursor = Cursor(iter([np.zeros(2)]))
    (item,) = cursor.peek()
    assert not cursor.takes_rows
    np.testing.assert_array_equal(cursor.fetch(2), [item])


def test_items_that_are_kept_are_copies_where_their_source_may_write_again():
    def reusing():
        buffer = np.zeros(1)
        for i in range(4):
            buffer[:] = i
            yield buffer

    cursor = Cursor(reusing())
    assert [item.item() for item in cursor.fetch(3)] == [0.0, 1.0, 2.0]
    cursor.stepped(2)
    assert [item.item() for item in cursor.fetch(2)] == [2.0, 3.0]


@pytest.mark.parametrize("shuffle", [False, True])
def test_only_new_arrays_are_marked_as_ones_that_nobody_writes_to(shuffle):
    x = np.arange(40, dtype=np.float32).reshape(20, 2)
    stream = ff.ArrayStream(x, batch_size=4, shuffle=shuffle, resident=False)
    for data in (stream, ff.data.prefetch(stream)):
        ((batch, _),) = Cursor(data).fetch(1)
        assert batch.flags.writeable != shuffle  # Without it they are views of `x`.
    pairs = [(x[:4], x[4:8])] * 2
    ((batch, _),) = Cursor(ff.data.prefetch(pairs)).fetch(1)
    assert not batch.flags.writeable and x.flags.writeable and next(stream)[0].flags.writeable
    remaining = Cursor(ff.data.prefetch(pairs), is_trained_on=False).remaining(as_views=False)
    assert [batch.flags.writeable for batch, _ in remaining] == [False, False]


@pytest.mark.parametrize("as_views", [False, True])
def test_a_pass_ends_after_all_batches_and_only_views_are_read_only(as_views):
    x = np.arange(14, dtype=np.float32).reshape(7, 2)
    pair = x, np.zeros((7, 0), np.float32)
    cursor = Cursor(ff.ArrayStream(pair, batch_size=2, epochs=1), is_trained_on=False)
    cursor.peek()
    batches = [inputs for inputs, _ in cursor.remaining(as_views=as_views)]
    np.testing.assert_array_equal(np.concatenate([batch for batch, _ in batches]), x)
    assert [empty.shape for _, empty in batches] == [(2, 0)] * 3 + [(1, 0)]
    assert [batch.flags.writeable for batch, _ in batches] == [True, *[not as_views] * 2, True]
    assert [*cursor.remaining(as_views=as_views)] == []


def test_a_source_may_write_again_to_what_was_read_ahead():
    buffer = np.zeros((4, 2), np.float32)

    def reusing():
        for i in range(4):
            buffer[:] = i
            yield buffer

    cursor = Cursor(ff.data.prefetch(reusing()))
    items = [cursor.fetch(1)[0], *(cursor.stepped(1) or cursor.fetch(1)[0] for _ in range(3))]
    assert [item[0, 0] for item in items] == [0, 1, 2, 3] and buffer.flags.writeable
