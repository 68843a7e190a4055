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
    (batch,) = as_stream(data, batch_size=10, epochs=1)
    for found, expected in zip(jax.tree.leaves(batch), (X, Y, W), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("data", [X, (X,), (X, ()), (X, None), {"x": X}, {"tokens": X}], ids=str)
def test_targets_may_be_missing(data):
    batch = normalize(next(as_stream(data, batch_size=4)))
    np.testing.assert_array_equal(jax.tree.leaves(batch.inputs)[0], X[:4])
    assert (batch.targets, batch.weights) == ((), None)


class Position:
    """A stream that is returned as it is."""

    def __init__(self, n=0):
        self.n = n

    def __iter__(self):
        return self

    def __next__(self):
        if self.n == 3:
            raise StopIteration
        self.n += 1
        return X[:4] + self.n

    def get_state(self):
        return {"n": self.n}

    def set_state(self, state):
        self.n = state["n"]


def test_a_stream_with_a_position_is_passed_through_and_keeps_it():
    for stream in (Position(), ArrayStream(X)):
        assert as_stream(stream) is stream
    divided = as_stream(Position(), shared=False)
    next(divided)
    state, expected = divided.get_state(), next(divided)
    divided.set_state(state)
    np.testing.assert_array_equal(next(divided), expected)
    with pytest.raises(ValueError, match="A Position gave no batches"):
        next(one_pass(Position(3)))


def test_options_reach_the_data_set():
    stream = as_stream((X, Y), batch_size=3, shuffle=True, seed=5, epochs=2, drop_remainder=True)
    expected = ArrayStream(X, Y, batch_size=3, shuffle=True, seed=5, epochs=2, drop_remainder=True)
    for (x, y), (expected_x, expected_y) in zip(stream, expected, strict=True):
        np.testing.assert_array_equal(x, expected_x)
        np.testing.assert_array_equal(y, expected_y)


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
    ],
    ids=str,
)
def test_wrong_forms_are_refused_with_what_came_and_what_is_accepted(data, error, message):
    with pytest.raises(error) as raised:
        as_stream(data)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "make", [lambda: [X, X], lambda: iter([X, X]), lambda: lambda: [X, X], Position]
)
def test_data_is_divided_only_where_that_is_said(make):
    for shared in (True, False):
        stream = as_stream(make(), shared=shared)
        for each in (stream, one_pass(stream), prefetch(stream), as_stream(stream)):
            assert is_shared(each) is shared


@pytest.mark.parametrize("data", [X, (X, Y), ArrayStream(X)], ids=["x", "(x, y)", "stream"])
def test_arrays_cannot_be_said_to_be_divided(data):
    with pytest.raises(ValueError, match=r"shared=False cannot be applied to arrays"):
        as_stream(data, shared=False)
