import contextlib
import gc
import itertools
import sqlite3
import threading
import traceback

import numpy as np
import pytest

from flaxfit.data import ArrayStream, as_stream, one_pass, prefetch


class Counting:
    """An endless stream that tells when it has made a batch."""

    def __init__(self):
        self.n_made = 0
        self.made = threading.Condition()

    def __iter__(self):
        return self

    def __next__(self):
        with self.made:
            self.n_made += 1
            self.made.notify_all()
        return self.n_made

    def wait_for(self, n, timeout=5.0):
        with self.made:
            return self.made.wait_for(lambda: self.n_made >= n, timeout)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    gc.freeze()  # What other tests have made need not be looked through.
    yield
    gc.collect()
    gc.unfreeze()
    assert set(threading.enumerate()) == before


def numbers(batches):
    return [x.tolist() for x, _ in batches]


@pytest.mark.parametrize("n", [1, 2, 7])
def test_the_batches_are_those_of_the_stream(n):
    def stream():
        return ArrayStream(np.arange(11), batch_size=2, shuffle=True, epochs=3)

    ahead, n_threads = prefetch(stream(), n), threading.active_count()
    assert len(ahead) == 6
    assert numbers(ahead) == numbers(stream())
    assert threading.active_count() == n_threads  # The thread ends with the data.
    assert list(ahead) == []
    with pytest.raises(ValueError, match="Cannot assemble 0 batches ahead"):
        prefetch(stream(), 0)


@pytest.mark.parametrize("n", [1, 3])
def test_no_more_than_n_batches_are_made_ahead(n):
    source = Counting()
    stream = prefetch(source, n)
    assert next(stream) == 1
    for delivered in range(2, 6):
        assert next(stream) == delivered
        assert source.wait_for(delivered + n)
        assert not source.wait_for(delivered + n + 1, timeout=0.02)
    stream.close()


def test_nothing_is_read_ahead_before_the_second_batch_is_asked_for():
    source = Counting()
    stream = prefetch(source)
    assert not source.wait_for(1, timeout=0.02)
    next(stream)
    assert not source.wait_for(2, timeout=0.02)


@pytest.mark.parametrize("n_delivered", [0, 1, 4, 6])
def test_the_position_is_that_of_the_last_delivered_batch(n_delivered):
    def stream():
        return ArrayStream(np.arange(11), batch_size=2, shuffle=True, epochs=3)

    plain, ahead = stream(), prefetch(stream(), 3)
    list(itertools.islice(plain, n_delivered))
    list(itertools.islice(ahead, n_delivered))
    assert ahead.get_state() == plain.get_state()
    assert ahead.epoch == plain.epoch
    again = prefetch(stream(), 3)
    next(again)
    again.set_state(ahead.get_state())
    assert numbers(again) == numbers(plain)
    ahead.close()


def test_an_error_is_raised_where_the_batch_is_wanted_with_its_own_traceback():
    def generate():
        yield 1
        raise OSError("the disk is gone")

    stream = prefetch(generate(), 4)
    assert next(stream) == 1
    with pytest.raises(OSError, match="the disk is gone") as raised:
        next(stream)
    assert "generate" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    with pytest.raises(RuntimeError, match="stopped after it raised OSError"):
        next(stream)


def test_a_closed_stream_ends_its_thread_and_gives_no_more():
    stream = prefetch(Counting())
    next(stream)
    stream.close()
    stream.close()
    with pytest.raises(ValueError, match="was closed"):
        next(stream)


def test_a_forgotten_stream_ends_its_thread():
    before = threading.active_count()
    stream = prefetch(Counting())
    list(itertools.islice(stream, 2))
    assert threading.active_count() == before + 1
    del stream
    gc.collect()
    assert threading.active_count() == before


def test_one_pass_leaves_the_prefetched_stream_where_it_is():
    stream = prefetch(ArrayStream(np.arange(5), batch_size=2))
    next(stream)
    assert numbers(one_pass(stream)) == numbers(one_pass(stream)) == [[0, 1], [2, 3], [4]]
    assert next(stream)[0].tolist() == [2, 3]
    stream.close()


class Plain:
    """A user's own stream: what `DataStream` requires, and a position."""

    def __init__(self):
        self.n = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.n += 1
        if self.n > 4:
            raise StopIteration
        return self.n


class Positioned(Plain):
    def get_state(self):
        return {"n": self.n}

    def set_state(self, state):
        self.n = state["n"]


@pytest.mark.parametrize("make", [Plain, Positioned])
def test_a_stream_of_the_users_own_can_be_passed_over(make):
    ahead = prefetch(make())
    assert next(ahead) == 1
    ahead.close()
    once = prefetch(make()).one_epoch()
    assert list(once) == [1, 2, 3, 4]
    once.close()


def test_a_stream_that_tells_but_takes_no_position_goes_on_by_skipping():
    class Telling(Plain):
        get_state = Positioned.get_state

    first, second = prefetch(Telling()), prefetch(Telling())
    list(itertools.islice(first, 2))
    second.set_state(first.get_state())
    assert list(second) == [3, 4]
    first.close()


def test_a_source_may_write_each_batch_into_the_memory_of_the_one_before():
    class Reusing:
        def __iter__(self):
            buffer = {"x": np.zeros(1)}
            for i in range(5):
                buffer["x"][:] = i
                yield buffer

    assert [batch["x"].item() for batch in prefetch(Reusing(), 4)] == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("n_before", [0, 1, 3, 5])
def test_one_thread_opens_reads_and_moves_each_pass(n_before, capsys):
    def read():
        # Refuses other threads.
        with contextlib.closing(sqlite3.connect(":memory:")) as database:
            database.execute("create table numbers (x)")
            database.executemany("insert into numbers values (?)", [(i,) for i in range(4)])
            yield from database.execute("select x from numbers")

    def stream(**options):
        return prefetch(as_stream(read, epochs=2).passes(2, **options))

    assert [x for (x,) in stream()] == [*range(4)] * 2
    ahead = stream()
    list(itertools.islice(ahead, n_before))
    assert ahead.get_state()["delivered"] == n_before
    again = stream()
    next(again)
    again.set_state(ahead.get_state())
    assert [x for (x,) in again] == ([*range(4)] * 2)[n_before:]
    assert (f"skipping {n_before - 1} batches" in capsys.readouterr().err) == (n_before > 1)
    apart = stream(is_apart=True)
    assert [[x for (x,) in apart] for _ in range(2)] == [[*range(4)]] * 2
    ahead.close()
