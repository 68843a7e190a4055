import jax
import numpy as np
import pytest

from flaxfit.data import ArrayStream, as_stream, one_pass, prefetch
from flaxfit.data._batch import Batch, normalize
from flaxfit.data._stream import is_shared

X = np.arange(20, dtype=np.float32).reshape(10, 2)
Y = np.arange(10)
W = np.linspace(0, 1, 10, dtype=np.float32)


@pytest.mark.parametrize(
    "data",
    [
        (X, Y, W),
        {"x": X, "y": Y, "w": W},
        {"inputs": X, "targets": Y, "weights": W},
        Batch((X,), (Y,), W),
    ],
    ids=["tuple", "short names", "long names", "batch"],
)
def test_a_data_set_may_name_its_parts(data):
    stream = as_stream(data, batch_size=4, epochs=1)
    batches = [normalize(item) for item in stream]
    assert isinstance(stream, ArrayStream)
    assert [len(batch.weights) for batch in batches] == [4, 4, 2]
    np.testing.assert_array_equal(
        np.concatenate([jax.tree.leaves(batch.inputs)[0] for batch in batches]), X
    )
    np.testing.assert_array_equal(np.concatenate([batch.targets[0] for batch in batches]), Y)


@pytest.mark.parametrize("data", [X, (X,), (X, ()), (X, None), {"x": X}], ids=str)
def test_targets_may_be_missing(data):
    batch = normalize(next(as_stream(data, batch_size=4)))
    np.testing.assert_array_equal(jax.tree.leaves(batch.inputs)[0], X[:4])
    assert (batch.targets, batch.weights) == ((), None)


def test_another_mapping_is_keyword_inputs():
    batch = normalize(next(as_stream({"tokens": X, "mask": Y}, batch_size=4)))
    assert set(batch.inputs) == {"tokens", "mask"}
    batch = normalize(next(as_stream(({"tokens": X, "mask": Y}, Y), batch_size=4)))
    assert set(batch.inputs) == {"tokens", "mask"}
    np.testing.assert_array_equal(batch.targets[0], Y[:4])


def test_options_reach_the_data_set():
    stream = as_stream((X, Y), batch_size=3, shuffle=True, seed=5, epochs=2, drop_remainder=True)
    expected = ArrayStream(X, Y, batch_size=3, shuffle=True, seed=5, epochs=2, drop_remainder=True)
    for (x, y), (expected_x, expected_y) in zip(stream, expected, strict=True):
        np.testing.assert_array_equal(x, expected_x)
        np.testing.assert_array_equal(y, expected_y)


def test_a_stream_with_a_position_is_passed_through():
    class Stream:
        def __iter__(self):
            return self

        def __next__(self):
            return X, Y

        def get_state(self):
            return {}

        def set_state(self, state): ...

    for stream in (Stream(), ArrayStream(X)):
        assert as_stream(stream) is stream


def test_an_indexable_sequence_of_batches_is_read_by_index():
    class Sequence:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return X + index, Y

    stream = as_stream(Sequence(), epochs=2)
    assert [int(x[0, 0]) for x, _ in stream] == [0, 1, 2, 0, 1, 2]
    assert len(stream) == 3


def test_one_pass_over_arrays_or_an_endless_stream_is_one_epoch():
    stream = ArrayStream(X, batch_size=3, shuffle=True)
    next(stream)
    for data in (stream, stream, X):
        batches = list(one_pass(data, batch_size=3))
        np.testing.assert_array_equal(np.concatenate([x for x, _ in batches]), X)
        assert len(batches) == 4


def test_one_pass_over_an_ended_stream_of_another_kind_is_an_error():
    class Stream:
        def __iter__(self):
            return self

        def __next__(self):
            raise StopIteration

        def get_state(self):
            return {}

        def set_state(self, state): ...

    with pytest.raises(ValueError, match="A Stream gave no batches"):
        next(one_pass(Stream()))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (None, TypeError, "Cannot read batches from NoneType: None. Give arrays, a tuple"),
        (slice(3), TypeError, "an object with __getitem__ and __len__, a loader"),
        (3, TypeError, "Cannot read batches from int: 3. Give arrays"),
        ("data.csv", TypeError, "Cannot read batches from 'data.csv'. Give arrays"),
        (dict, TypeError, "Cannot read batches from <class 'dict'>"),
        ({"x": [1, 2]}, TypeError, "x[0] must be an array, got int: 1. Convert lists"),
        ({"train": "a"}, TypeError, "x['train'] must be an array, got str: 'a'"),
        ((X, Y, W, W), TypeError, "got 4 parts. Put several inputs into their own tuple"),
        ([1.0, 2.0], TypeError, "got a list of float: convert it with np.asarray"),
        ([], ValueError, "The list of batches is empty."),
        ((X, Y[:3]), ValueError, "x has 10 rows but y has 3."),
    ],
    ids=str,
)
def test_wrong_forms_are_refused_with_what_came_and_what_is_accepted(data, error, message):
    with pytest.raises(error) as raised:
        as_stream(data)
    assert message in str(raised.value)


class Position:
    """A stream that is returned as it is."""

    def __init__(self):
        self.n = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.n += 1
        return X[:4] + self.n

    def get_state(self):
        return {"n": self.n}

    def set_state(self, state):
        self.n = state["n"]


@pytest.mark.parametrize(
    "make", [lambda: [X, X], lambda: iter([X, X]), lambda: lambda: [X, X], Position]
)
def test_data_is_divided_only_where_that_is_said(make):
    for shared in (True, False):
        stream = as_stream(make(), shared=shared)
        for each in (stream, one_pass(stream), prefetch(stream), as_stream(stream)):
            assert is_shared(each) is shared


def test_a_stream_that_is_said_to_be_divided_keeps_its_position():
    stream = as_stream(Position(), shared=False)
    next(stream)
    state = stream.get_state()
    expected = next(stream)
    stream.set_state(state)
    np.testing.assert_array_equal(next(stream), expected)


@pytest.mark.parametrize("data", [X, (X, Y), ArrayStream(X)], ids=["x", "(x, y)", "stream"])
def test_arrays_cannot_be_said_to_be_divided(data):
    with pytest.raises(ValueError, match=r"shared=False cannot be applied to arrays"):
        as_stream(data, shared=False)
