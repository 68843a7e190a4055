import numpy as np
import pytest
from sklearn.metrics import accuracy_score, top_k_accuracy_score

from flaxfit.metrics import accuracy, binary_accuracy, top_k


def test_accuracy_of_integer_labels(digits, measured):
    logits, labels, weights = digits
    expected = accuracy_score(labels, logits.argmax(1), sample_weight=weights)
    assert 0.5 < expected < 0.95
    assert measured(accuracy, logits, labels, weights=weights) == pytest.approx(expected, rel=1e-6)


def test_accuracy_of_one_hot_labels_is_that_of_the_integers(digits, measured):
    logits, labels, weights = digits
    onehot = np.eye(10, dtype=np.float32)[labels]
    assert measured(accuracy, logits, onehot, weights=weights) == pytest.approx(
        measured(accuracy, logits, labels, weights=weights), rel=1e-7
    )


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


@pytest.mark.parametrize("outputs_shape", [(1,), (1, 1)])
@pytest.mark.parametrize("labels_shape", [(1,), (1, 1)])
def test_a_single_score_of_a_single_example_is_still_one(outputs_shape, labels_shape):
    sums = accuracy.measure(np.full(outputs_shape, -3.0), np.zeros(labels_shape, int))
    assert accuracy.compute(sums) == 1.0


def test_accuracy_by_token_weighs_whole_sequences():
    logits = np.eye(3)[np.array([[0, 1], [2, 2]])]
    labels = np.array([[0, 2], [2, 2]])
    sums = accuracy.measure(logits, labels, weights=np.array([3.0, 1.0]))
    assert accuracy.compute(sums) == pytest.approx((3 * 0.5 + 1) / 4)


@pytest.mark.parametrize(
    ("outputs_shape", "labels"),
    [
        ((8, 10), np.zeros((8, 1), np.int32)),
        ((8, 10), np.zeros(8, np.float32)),
        ((8,), np.zeros((8, 10), np.int32)),
        ((8, 10), np.zeros((8, 9), np.int32)),
    ],
)
def test_labels_that_fit_in_no_way_are_refused_with_both_shapes(outputs_shape, labels):
    with pytest.raises(ValueError) as error:
        accuracy.measure(np.zeros(outputs_shape), labels)
    assert f"for outputs of shape {outputs_shape}, got labels {labels.shape}" in str(error.value)


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


@pytest.mark.parametrize("k", [1, 3])
def test_top_k_agrees_with_scikit_learn(digits, measured, k):
    logits, labels, weights = digits
    expected = top_k_accuracy_score(labels, logits, k=k, sample_weight=weights)
    assert measured(top_k(k), logits, labels, weights=weights) == pytest.approx(expected, rel=1e-6)


def test_every_class_is_among_all_of_them(digits, measured):
    logits, labels, weights = digits
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
        assert metric.compute(metric.measure(outputs, labels)) == pytest.approx(expected)
        assert metric.name in ("accuracy", "binary_accuracy")
