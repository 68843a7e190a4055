"""Weights by class, of arrays and of batches."""

import numpy as np
import pytest

import flaxfit as ff
from flaxfit.data._class_weights import ClassWeightedStream, weights_by_class

Y = np.array([0, 0, 0, 1, 2, 2])


def test_balanced_weights_are_those_of_scikit_learn():
    found = weights_by_class(Y, "balanced")
    np.testing.assert_allclose(found, (6 / (3 * np.bincount(Y)))[Y], rtol=1e-6)
    class_weight = pytest.importorskip("sklearn.utils.class_weight")
    np.testing.assert_allclose(found, class_weight.compute_sample_weight("balanced", Y), rtol=1e-6)


def test_balanced_weights_do_not_count_what_has_no_weight():
    found = weights_by_class(Y, "balanced", np.array([1, 0, 0, 1, 1, 1]))
    np.testing.assert_allclose(found, (4 / (3 * np.array([1, 1, 2])))[Y], rtol=1e-6)


@pytest.mark.parametrize(
    "batch",
    [
        (Y, Y),
        (Y, np.eye(3)[Y]),
        ((Y,), [Y[:, None]]),
        {"x": Y, "y": Y},
        (Y, Y, np.full(6, 2.0)),
        (Y, Y.astype(float), np.full((6, 1), 2.0)),
    ],
    ids=["labels", "one-hot", "lists", "mapping", "weights", "column"],
)
def test_the_batches_of_a_stream_are_weighted_by_label(batch):
    *_, weights = next(ClassWeightedStream(iter([batch]), {2: 3.0, 1: 0.5}))
    factor = 2 if isinstance(batch, tuple) and len(batch) == 3 else 1
    np.testing.assert_allclose(weights.ravel(), factor * np.array([1, 1, 1, 0.5, 3, 3]))


def test_a_weighted_stream_has_the_position_of_its_stream():
    stream = ClassWeightedStream(ff.ArrayStream(Y, Y, batch_size=2), {2: 3.0})
    assert len(stream) == 3 and not hasattr(stream, "next_rows")
    next(stream)
    assert stream.get_state()["batch"] == 1
    np.testing.assert_array_equal(stream.whole()[2], [1, 1, 1, 1, 3, 3])


@pytest.mark.parametrize(
    ("class_weight", "error", "message"),
    [
        ("balanced", ValueError, "needs the labels of all examples, but each batch"),
        ([1.0], TypeError, r"must map labels to weights, such as \{0: 1.0, 1: 2.5\}, got list"),
        ({"a": 1.0}, TypeError, "labels of class_weight must be integers, got 'a'"),
    ],
)
def test_class_weights_of_batches_are_by_integer(class_weight, error, message):
    with pytest.raises(error, match=message):
        ClassWeightedStream(iter([]), class_weight)


TOKENS = np.array([[2, 1], [1, 1], [0, 1], [1, 0], [0, 1], [1, 0]])


@pytest.mark.parametrize("dtype", [int, float])
def test_labels_of_tokens_are_read_alike_in_arrays_and_in_every_batch(dtype):
    y = TOKENS.astype(dtype)
    expected = np.where(TOKENS == 1, 9, 1)
    np.testing.assert_array_equal(weights_by_class(y, {1: 9.0}), expected)
    np.testing.assert_array_equal(weights_by_class(y[2:], {1: 9.0}, all_of=y), expected[2:])
    stream = ClassWeightedStream(ff.ArrayStream(y, y, batch_size=2, epochs=1), {1: 9.0})
    np.testing.assert_array_equal(np.concatenate([w for *_, w in stream]), expected)


def test_integers_that_may_be_one_hot_are_refused_in_a_first_batch():
    y = TOKENS[::-1]
    with pytest.raises(
        ValueError, match=r"cannot tell .* \(2, 2\), are one-hot rows or the labels"
    ):
        next(ClassWeightedStream(ff.ArrayStream(y, y, batch_size=2), {1: 9.0}))


def test_batches_that_are_not_one_hot_as_those_before_are_refused():
    y = TOKENS[::-1].astype(float)
    stream = ClassWeightedStream(ff.ArrayStream(y, y, batch_size=2, epochs=1), {1: 9.0})
    assert next(stream)[2].tolist() == [1, 9]
    next(stream)
    with pytest.raises(
        ValueError, match=r"of earlier batches as one-hot rows, but those of this batch are not"
    ):
        next(stream)


def test_targets_of_several_outputs_are_refused():
    with pytest.raises(ValueError, match="a single array of labels as targets y"):
        next(ClassWeightedStream(iter([(Y, (Y, Y))]), {0: 2.0}))
    with pytest.raises(ValueError, match="cannot be combined with sample_weight by output"):
        next(ClassWeightedStream(iter([(Y, Y, {"a": Y})]), {0: 2.0}))
