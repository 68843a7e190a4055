import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow, thorough
from measuring import value_of
from sklearn.metrics import accuracy_score, top_k_accuracy_score

from flaxfit.metrics import (
    accuracy,
    auc,
    binary_accuracy,
    exact_match,
    hamming_loss,
    perplexity,
    top_k,
)


def test_accuracy_of_integer_and_of_one_hot_labels(digits, measured):
    logits, labels, weights = digits
    expected = accuracy_score(labels, logits.argmax(1), sample_weight=weights)
    assert 0.5 < expected < 0.95
    for targets in labels, np.eye(10, dtype=np.float32)[labels]:
        value = measured(accuracy, logits, targets, weights=weights)
        assert value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("outputs_shape", [(-1,), (-1, 1)])
@pytest.mark.parametrize("labels_shape", [(-1,), (-1, 1)])
def test_accuracy_of_a_single_score_has_its_threshold_at_zero(
    tumours, measured, outputs_shape, labels_shape
):
    scores, labels, weights = tumours
    expected = accuracy_score(labels, scores > 0, sample_weight=weights)
    value = measured(
        accuracy, scores.reshape(outputs_shape), labels.reshape(labels_shape), weights=weights
    )
    assert value == pytest.approx(expected, rel=1e-6)


def test_a_single_score_of_a_single_example_is_still_one():
    for of_outputs, of_labels in itertools.product([(1,), (1, 1)], repeat=2):
        assert value_of(accuracy, np.full(of_outputs, -3.0), np.zeros(of_labels, int)) == 1.0


def test_accuracy_by_token_weighs_whole_sequences():
    logits = np.eye(3)[np.array([[0, 1], [2, 2]])]
    labels = np.array([[0, 2], [2, 2]])
    value = value_of(accuracy, logits, labels, weights=np.array([3.0, 1.0]))
    assert value == pytest.approx((3 * 0.5 + 1) / 4)


def test_labels_that_fit_in_no_way_are_refused_with_both_shapes():
    for shape, labels in (
        ((8, 10), np.zeros((8, 1), np.int32)),
        ((8, 10), np.zeros(8, np.float32)),
        ((8,), np.zeros((8, 10), np.int32)),
        ((8, 10), np.zeros((8, 9), np.int32)),
    ):
        message = re.escape(f"for outputs of shape {shape}, got labels {labels.shape}")
        with pytest.raises(ValueError, match=message):
            accuracy.measure(np.zeros(shape), labels)


def test_binary_accuracy_counts_every_answer(measured):
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(50, 4)).astype(np.float32)
    labels = generator.integers(0, 2, (50, 4)).astype(np.int32)
    weights = generator.uniform(size=50).astype(np.float32)
    expected = np.average(((logits > 0) == labels).mean(1), weights=weights)
    value = measured(binary_accuracy, logits, labels, weights=weights)
    assert value == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match=r"got outputs \(50, 4\) and labels \(50,\)"):
        binary_accuracy.measure(logits, labels[:, 0])


def test_answers_of_an_example_are_right_one_by_one_or_all_together(measured):
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(50, 3)).astype(np.float32)
    labels, weights = (logits + generator.normal(size=(50, 3)) > 0).astype(int), logits[:, 0] ** 2
    is_right = (logits > 0) == labels
    value = measured(hamming_loss, logits, labels, weights=weights)
    assert value == pytest.approx(np.average(1 - is_right.mean(1), weights=weights), rel=1e-5)
    value = measured(exact_match, logits, labels, weights=weights)
    assert value == pytest.approx(np.average(is_right.all(1), weights=weights), rel=1e-5)
    shares = 1 / (1 + np.exp(-logits))
    for metric in hamming_loss, exact_match:
        assert measured(metric(from_logits=False), shares, labels) == measured(
            metric, logits, labels
        )
        with pytest.warns(UserWarning, match="labels are not valid classes"):
            assert np.isnan(value_of(metric, logits, labels + (logits == logits.max())))
    assert (hamming_loss.mode, exact_match.mode) == ("min", "max")
    with pytest.raises(ValueError, match=r"several answers per example.*outputs of shape \(4,\)"):
        exact_match.measure(np.zeros(4), np.zeros(4))


@pytest.mark.parametrize("k", [1, 3])
def test_top_k_agrees_with_scikit_learn(digits, measured, k):
    logits, labels, weights = digits
    expected = top_k_accuracy_score(labels, logits, k=k, sample_weight=weights)
    assert measured(top_k(k), logits, labels, weights=weights) == pytest.approx(expected, rel=1e-6)
    without = top_k(k, ignore_label=3)
    expected = measured(top_k(k), logits[labels != 3], labels[labels != 3])
    assert measured(without, logits, labels) == pytest.approx(expected, rel=1e-6)
    assert measured(top_k(10), logits, labels, weights=weights) == 1.0


def test_top_k_of_too_many_or_too_few_classes_is_refused():
    with pytest.raises(ValueError, match="top 0 classes: k must be at least 1"):
        top_k(0)
    with pytest.raises(ValueError, match="top 5 of 3 classes"):
        top_k(5).measure(np.zeros((2, 3)), np.zeros(2, np.int32))


@pytest.mark.parametrize("threshold", [-0.5, 0.0, 0.5])
def test_the_threshold_is_the_logit_above_which_class_1_is_predicted(threshold):
    scores, labels = np.linspace(-1, 1, 9), np.array([0, 0, 1, 0, 1, 0, 1, 1, 1])
    expected = np.mean((scores > threshold) == labels)
    two = np.stack([np.zeros(9), scores], 1)
    for metric, outputs in (accuracy, scores), (accuracy, two), (binary_accuracy, scores):
        metric = metric(threshold=threshold)
        assert value_of(metric, outputs, labels) == pytest.approx(expected)
        assert metric.name in ("accuracy", "binary_accuracy")


ONE_SCORE = np.linspace(-2, 2, 4).astype(np.float32)
THREE_SCORES = np.eye(3, dtype=np.float32)[[0, 1, 2, 0]]


@pytest.mark.parametrize(
    ("metric", "outputs", "labels"),
    [
        *((metric, THREE_SCORES, [0, 1, 2, -1]) for metric in (accuracy, top_k(2), perplexity)),
        *(slow(metric, THREE_SCORES, [0, 1, 2, 3]) for metric in (accuracy, top_k(2), perplexity)),
        *(slow(metric, ONE_SCORE, [0, 1, 1, -1]) for metric in (accuracy, binary_accuracy, auc)),
        *((metric, ONE_SCORE, [0, 1, 1, 2]) for metric in (accuracy, binary_accuracy, auc)),
        slow(auc, THREE_SCORES[:, :2], [0, 1, 1, 2]),
        (accuracy, THREE_SCORES, [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]]),
        (top_k(1), THREE_SCORES, [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]),
        (accuracy, THREE_SCORES, [[1, 0, 0], [0, 1, 0], [0, 0, 1], [2, -1, 0]]),
    ],
)
def test_a_label_that_names_no_class_makes_the_value_nan_unless_it_has_no_weight(
    metric, outputs, labels
):
    labels = np.array(labels)
    weights = np.array([1.0, 1, 1, 0], np.float32)
    assert value_of(metric, outputs, labels, weights=weights) == value_of(
        metric, outputs[:3], labels[:3]
    )
    with pytest.warns(UserWarning, match=f"{metric.name!r} is NaN.*labels are not valid classes"):
        assert np.isnan(value_of(metric, outputs, labels))


@pytest.mark.parametrize("metric", [accuracy, top_k(2), perplexity, auc, binary_accuracy])
def test_nan_outputs_are_no_prediction(metric):
    is_single = metric in (auc, binary_accuracy)
    outputs = (ONE_SCORE if is_single else THREE_SCORES).copy()
    outputs[3] = np.nan
    labels = np.array([0, 1, 1, 1])  # Not what the largest of NaN would be.
    assert np.isnan(value_of(metric, outputs, labels))
    weights = np.array([1.0, 1, 1, 0], np.float32)
    assert np.isfinite(value_of(metric, outputs, labels, weights=weights))


def test_probabilities_have_their_threshold_at_a_half(tumours, measured):
    scores, labels, weights = tumours
    probabilities = (1 / (1 + np.exp(-scores))).astype(np.float32)
    two = np.stack([1 - probabilities, probabilities], 1)
    expected = measured(accuracy, scores, labels, weights=weights)
    for metric, outputs in (accuracy, probabilities), (accuracy, two), (binary_accuracy, two[:, 1]):
        value = measured(metric(from_logits=False), outputs, labels, weights=weights)
        assert value == pytest.approx(expected, rel=1e-6)
    high = accuracy(from_logits=False, threshold=0.9)
    assert value_of(high, probabilities, labels) == np.mean((probabilities > 0.9) == labels)


def test_probabilities_are_not_silently_taken_for_logits_nor_logits_for_probabilities():
    probabilities, labels = np.linspace(0.1, 0.9, 20), np.arange(20) % 2
    for metric in accuracy, binary_accuracy:
        with pytest.warns(UserWarning, match=rf"logits.*{metric.name}\(from_logits=False\)"):
            value_of(metric, probabilities, labels)
        value_of(metric(threshold=0.5), probabilities, labels)
        value_of(metric, probabilities - 0.2, labels)
        value_of(metric, np.zeros(20), labels)  # What an untrained model gives.
        with pytest.warns(UserWarning, match="takes probabilities, and got outputs below 0"):
            assert np.isnan(value_of(metric(from_logits=False), ONE_SCORE, np.zeros(4)))
    two = np.stack([probabilities, 1 - probabilities], 1)
    assert value_of(accuracy, two, labels) == 0.5
    with pytest.warns(UserWarning, match=r"perplexity\(from_logits=False\)"):
        value_of(perplexity, two, labels)


@pytest.mark.parametrize("dtype", [jnp.uint8, thorough(jnp.int32), jnp.bool_])
def test_labels_may_be_of_any_whole_dtype(dtype):
    labels = jnp.asarray([0, 1, 1, 0]).astype(dtype)
    assert value_of(accuracy, ONE_SCORE, labels) == 0.5
    assert value_of(accuracy, jnp.eye(2).astype(dtype), jnp.eye(2).astype(dtype)) == 1.0
    if dtype != jnp.bool_:
        assert value_of(accuracy, np.eye(300)[:4], jnp.asarray([0, 1, 2, 4]).astype(dtype)) == 0.75


def test_scores_of_narrow_dtypes_do_not_wrap_around():
    scores = np.array([[200, 100], [0, 1]], np.uint8)
    assert value_of(accuracy, scores, np.array([0, 1])) == 1.0
    large = jnp.array([[-6e4, 6e4], [6e4, -6e4]], jnp.float16)
    assert value_of(accuracy(threshold=1e5), large, np.array([1, 0])) == 1.0


def test_infinite_scores_are_compared():
    scores = np.array([[np.inf, np.inf], [-np.inf, 0], [0, np.inf]], np.float32)
    assert value_of(accuracy, scores, np.array([0, 1, 1])) == 1.0
