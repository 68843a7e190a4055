"""Batches by index: their order, position and the calls at the ends of passes."""

import itertools
import json
import threading

import numpy as np
import pytest

from flaxfit.data import as_stream, one_pass, prefetch

N = 5


class Indexed:
    """Batches by index, with a record of what was called."""

    def __init__(self, n=N):
        self.n, self.calls = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        assert type(index) is int
        self.calls.append(index)
        return np.full((2, 3), index), np.full(2, index)

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")


class Reordered(Indexed):
    """Rows that a generator of its own shuffles in place after each pass, as many of Keras's do."""

    def __init__(self):
        super().__init__()
        self.rng, self.rows = np.random.default_rng(3), np.arange(4 * N)

    def __getitem__(self, index):
        return self.rows[4 * index : 4 * index + 4][:, None], np.zeros(4)

    def on_epoch_end(self):
        self.rng.shuffle(self.rows)


def numbers(batches):
    return [int(x[0, 0]) for x, _ in batches]


def rows(batches):
    return [x[:, 0].tolist() for x, _ in batches]


@pytest.mark.parametrize("wrap", [lambda stream: stream, prefetch], ids=["plain", "ahead"])
def test_each_pass_begins_and_ends_once(wrap):
    data = Indexed()
    stream = wrap(as_stream(data, epochs=2))
    assert len(stream) == N
    assert numbers(stream) == [*range(N)] * 2
    assert data.calls == ["begin", *range(N), "end"] * 2


def test_data_without_hooks_is_read_by_index_unless_it_iterates_in_its_own_way():
    class Plain:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return np.full((2, 3), index), np.zeros(2)

    class Backwards(Plain):
        def __iter__(self):
            return (self[index] for index in (1, 0))

    assert numbers(as_stream(Plain(), epochs=2)) == [0, 1, 0, 1]
    assert numbers(as_stream(Backwards(), epochs=2)) == [1, 0, 1, 0]


def test_a_shuffled_order_depends_on_the_seed_and_the_epoch_alone():
    expected = [
        *np.random.default_rng((7, 0)).permutation(N),
        *np.random.default_rng((7, 1)).permutation(N),
    ]
    stream = as_stream(Indexed(), shuffle=True, seed=7, epochs=2)
    assert numbers(stream) == expected
    assert numbers(stream.passes(1, start=1)) == expected[N:]
    assert sorted(numbers(as_stream(Indexed(), shuffle=True, seed=8))) == [*range(N)]


@pytest.mark.parametrize("make", [Indexed, Reordered])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("n_delivered", [0, 1, 4, 5, 7, 10, 13])
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_position_is_reached_exactly_without_skipping(
    make, shuffle, n_delivered, is_begun, capsys
):
    first, second = (as_stream(make(), shuffle=shuffle, epochs=3) for _ in range(2))
    list(itertools.islice(first, n_delivered))
    state = json.loads(json.dumps(first.get_state()))
    if is_begun:  # A loop looks at the first batch.
        next(second)
    second.set_state(state)
    assert rows(second) == rows(first)
    assert not capsys.readouterr().err or n_delivered == 0


def test_a_resumed_pass_calls_what_an_uninterrupted_one_would():
    first, second = Indexed(), Indexed()
    stream, other = as_stream(first, epochs=3), as_stream(second, epochs=3)
    list(itertools.islice(stream, 7))
    other.set_state(stream.get_state())
    second.calls = [each for each in second.calls if isinstance(each, str)]
    list(other)
    assert second.calls == ["begin", "end", "begin", 2, 3, 4, "end", "begin", *range(N), "end"]


def test_a_position_of_another_order_or_length_is_refused():
    stream = as_stream(Indexed(), shuffle=True)
    next(stream)
    state = stream.get_state()
    for other in as_stream(Indexed()), as_stream(Indexed(), shuffle=True, seed=1):
        with pytest.raises(ValueError, match="other data than the position was saved in"):
            other.set_state(state)
    with pytest.raises(ValueError, match="other data than the position was saved in"):
        as_stream(Indexed(6), shuffle=True).set_state(state)


def test_batches_stay_as_they_were_when_the_end_of_a_pass_shuffles_in_place():
    data = Reordered()
    before = data.rows[-4:].tolist()
    *_, (last, _) = as_stream(data)
    assert last[:, 0].tolist() == before != data.rows[-4:].tolist()


class Endless(Indexed):
    """Batches without a number of them, as a PyDataset may be."""

    def __len__(self):
        raise TypeError("it has none")


def test_batches_without_a_length_have_no_end_and_no_random_order():
    stream = as_stream(Endless(), epochs=None)
    assert numbers(itertools.islice(stream, 7)) == [*range(7)]
    again = as_stream(Endless(), epochs=None)
    again.set_state(stream.get_state())
    assert numbers(itertools.islice(again, 1)) == [7]
    with pytest.raises(ValueError, match="but this Endless has no length"):
        next(as_stream(Endless(), shuffle=True))


class Threaded(Indexed):
    """Batches of which none is there before two are being read."""

    workers, max_queue_size = 2, 3

    def __init__(self, n=6, fails=()):
        super().__init__(n)
        self.fails, self.begun, self.are_two = fails, set(), threading.Event()

    def __getitem__(self, index):
        self.begun.add(index)
        if len(self.begun) > 1:
            self.are_two.set()
        assert self.are_two.wait(30)
        if index in self.fails:
            raise KeyError(index)
        return np.full((2, 3), index), np.full(2, index)


def test_several_threads_read_ahead_and_keep_the_order_and_the_position():
    first, second = (as_stream(Threaded(), shuffle=True, epochs=2) for _ in range(2))
    whole = numbers(first)
    assert whole == numbers(as_stream(Indexed(6), shuffle=True, epochs=2))
    assert numbers(itertools.islice(second, 4)) == whole[:4]
    third = as_stream(Threaded(), shuffle=True, epochs=2)
    third.set_state(second.get_state())
    assert numbers(third) == whole[4:]


def test_what_a_thread_raises_is_raised_where_the_batch_is_wanted():
    stream = as_stream(Threaded(fails=[3]))
    assert numbers(itertools.islice(stream, 3)) == [0, 1, 2]
    with pytest.raises(KeyError, match="3"):
        next(stream)


def test_each_of_several_single_passes_is_in_the_stored_order():
    assert numbers(one_pass(Indexed())) == numbers(one_pass(Indexed())) == [*range(N)]


def test_a_callable_may_return_batches_by_index():
    found = numbers(as_stream(lambda: Indexed(), shuffle=True, epochs=2))
    assert found == numbers(as_stream(Indexed(), shuffle=True, epochs=2))


@pytest.mark.parametrize("option", [{"batch_size": 4}, {"drop_remainder": True}])
def test_batches_are_not_cut(option):
    with pytest.raises(ValueError, match=r"cannot be applied to a Indexed, which gives batches"):
        as_stream(Indexed(), **option)


@pytest.mark.slow
def test_a_py_dataset_of_keras_is_read_by_index():
    keras = pytest.importorskip("keras", reason="keras is not installed")

    class Data(keras.utils.PyDataset, Indexed):
        def __init__(self):
            keras.utils.PyDataset.__init__(self)
            Indexed.__init__(self)

        on_epoch_begin, on_epoch_end = Indexed.on_epoch_begin, Indexed.on_epoch_end
        __getitem__ = Indexed.__getitem__

    data = Data()
    found = numbers(as_stream(data, shuffle=True, seed=7))
    assert found == np.random.default_rng((7, 0)).permutation(N).tolist()
    assert data.calls == ["begin", *found, "end"]
