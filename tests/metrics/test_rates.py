import numpy as np
import pytest
import sklearn.metrics
from measuring import value_of

from flaxfit.metrics import (
    binary_iou,
    confusion_matrix,
    dice,
    f1,
    false_negative_rate,
    false_positive_rate,
    fbeta,
    iou,
    mean_iou,
    negative_predictive_value,
    precision,
    recall,
    specificity,
    true_positives,
)

RATES = [
    (precision, sklearn.metrics.precision_score),
    (recall, sklearn.metrics.recall_score),
    (f1, sklearn.metrics.f1_score),
]
rates = pytest.mark.parametrize(("metric", "reference"), RATES, ids=["precision", "recall", "f1"])


@rates
@pytest.mark.parametrize("threshold", [0.0, 1.5])
def test_binary_rates_of_a_single_score(tumours, measured, metric, reference, threshold):
    scores, labels, weights = tumours
    expected = reference(labels, scores > threshold, sample_weight=weights)
    value = measured(metric(threshold=threshold), scores[:, None], labels, weights=weights)
    assert value == pytest.approx(expected, rel=1e-6)


@rates
def test_two_classes_are_binary_unless_told_otherwise(tumours, measured, metric, reference):
    scores, labels, weights = tumours
    two_scores = np.stack([-scores / 2, scores / 2], axis=1)
    assert measured(metric, two_scores, labels, weights=weights) == pytest.approx(
        measured(metric, scores, labels, weights=weights), rel=1e-7
    )
    expected = reference(labels, scores > 0, sample_weight=weights, average="macro")
    value = measured(metric(average="macro"), two_scores, labels, weights=weights)
    assert value == pytest.approx(expected, rel=1e-6)


@rates
@pytest.mark.parametrize("average", ["macro", "micro"])
def test_rates_of_many_classes(digits, measured, metric, reference, average):
    logits, labels, weights = digits
    expected = reference(labels, logits.argmax(1), sample_weight=weights, average=average)
    value = measured(metric(average=average), logits, labels, weights=weights)
    assert value == pytest.approx(expected, rel=1e-6)
    if average == "macro":
        assert value == measured(metric, logits, labels, weights=weights)


@rates
def test_classes_that_never_occur_do_not_lower_the_macro_average(metric, reference):
    logits, labels = np.eye(6)[[0, 0, 1, 2]], np.array([0, 1, 1, 4])
    value = value_of(metric, logits, labels)
    expected = reference(labels, logits.argmax(1), average="macro", zero_division=0.0)
    assert value == pytest.approx(expected, rel=1e-6)


@rates
def test_rates_of_nothing(metric, reference):
    scores, labels = np.full(3, -1.0), np.zeros(3, np.int32)
    assert value_of(metric, scores, labels) == reference(labels, scores > 0, zero_division=0.0)
    assert np.isnan(value_of(metric, scores, labels, weights=np.zeros(3)))


@rates
@pytest.mark.parametrize("average", ["weighted", None])
def test_rates_by_class_and_weighted_by_how_often_classes_occur(
    digits, measured, metric, reference, average
):
    logits, labels, weights = digits
    labels = labels % 7  # Three classes are predicted, but never occur.
    options = {"average": average, "zero_division": 0.0, "labels": range(10)}
    expected = reference(labels, logits.argmax(1), sample_weight=weights, **options)
    value = measured(metric(average=average), logits, labels, weights=weights)
    np.testing.assert_allclose(value, expected, rtol=1e-6)


@rates
@pytest.mark.parametrize("average", ["macro", "micro", "weighted", "samples", None])
def test_rates_of_several_labels_per_example(measured, metric, reference, average):
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(300, 5)).astype(np.float32)
    labels = (logits + generator.normal(size=(300, 5)) > 1).astype(np.uint8)
    labels[:, 4] = 0
    logits[:9, 2] = 0.4
    weights = generator.uniform(size=300).astype(np.float32)
    options = {"average": average, "sample_weight": weights, "zero_division": 0.0}
    expected = reference(labels, logits > 0.5, **options)
    multilabel = metric(average=average, multilabel=True, threshold=0.5)
    value = measured(multilabel, logits, labels, weights=weights)
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_labels_of_several_classes_are_not_taken_for_one_hot_labels():
    logits, labels = np.ones((4, 3), np.float32), np.array([[1, 0, 1]] * 4)
    for metric in precision, recall, f1, f1(average=None), confusion_matrix(3):
        with pytest.warns(UserWarning, match=r"is NaN.*several labels.*f1 with multilabel=True"):
            assert np.isnan(value_of(metric, logits, labels)).all()


def test_an_average_that_cannot_be_taken_is_refused():
    with pytest.raises(ValueError, match="'weighted', 'samples' or None, got 'median'"):
        f1(average="median")
    with pytest.raises(ValueError, match="'samples' of 'f1' is for several labels.*label=True"):
        f1(average="samples")
    with pytest.raises(ValueError, match="'binary' of 'f1' is for one label.*multilabel=False"):
        f1(average="binary", multilabel=True)
    with pytest.raises(ValueError, match=r"'f1' expects labels of the shape.*\(3, 5\).*\(3,\)"):
        f1(multilabel=True).measure(np.zeros((3, 5)), np.zeros(3, np.int32))
    with pytest.raises(ValueError, match=r"binary 'f1' of 10 classes: use f1\(average='macro'\)"):
        f1(average="binary").measure(np.zeros((3, 10)), np.zeros(3, np.int32))


@rates
@pytest.mark.parametrize("n_scores", [1, 2])
def test_rates_of_probabilities(tumours, measured, metric, reference, n_scores):
    scores, labels, weights = tumours
    one = (1 / (1 + np.exp(-scores))).astype(np.float32)
    outputs = one if n_scores == 1 else np.stack([1 - one, one], 1)
    for threshold in None, 0.3:
        predicted = one > (threshold or 0.5)
        expected = reference(labels, predicted, sample_weight=weights)
        chosen = metric(from_logits=False, threshold=threshold)
        assert measured(chosen, outputs, labels, weights=weights) == pytest.approx(expected)


BY_COUNTS = [
    (specificity, lambda tp, fp, fn, tn: tn / (tn + fp)),
    (negative_predictive_value, lambda tp, fp, fn, tn: tn / (tn + fn)),
    (false_positive_rate, lambda tp, fp, fn, tn: fp / (tn + fp)),
    (false_negative_rate, lambda tp, fp, fn, tn: fn / (tp + fn)),
    (dice, lambda tp, fp, fn, tn: 2 * tp / (2 * tp + fp + fn)),
    (iou, lambda tp, fp, fn, tn: tp / (tp + fp + fn)),
]


@pytest.mark.slow
def test_other_rates_of_many_classes(digits):
    logits, labels, weights = digits
    matrices = sklearn.metrics.multilabel_confusion_matrix(
        labels, logits.argmax(1), sample_weight=weights
    )
    counts = matrices[:, [1, 0, 1, 0], [1, 1, 0, 0]].T
    for metric, by_hand in BY_COUNTS:
        sums = metric.measure(logits, labels, weights=weights)  # Averages change none of them.
        by_class = metric(average=None).compute(sums)
        np.testing.assert_allclose(by_class, by_hand(*counts), rtol=1e-5)
        micro = metric(average="micro").compute(sums)
        assert micro == pytest.approx(by_hand(*counts.sum(1)), rel=1e-5)
        assert metric.compute(sums) == pytest.approx(by_class.mean())


def test_fbeta_counts_recall_beta_times(digits, measured):
    logits, labels, weights = digits
    for beta, average in (2.0, "macro"), (0.5, "weighted"):
        expected = sklearn.metrics.fbeta_score(
            labels, logits.argmax(1), beta=beta, average=average, sample_weight=weights
        )
        value = measured(fbeta(beta=beta, average=average), logits, labels, weights=weights)
        assert value == pytest.approx(expected, rel=1e-6)


def test_a_class_that_is_alone_in_the_data_has_no_negatives():
    logits, labels, weights = np.eye(3)[[1, 1, 1]], np.full(3, 1), np.array([0.1, 0.7, 1.3])
    value = value_of(specificity(average=None, zero_division=0.5), logits, labels, weights=weights)
    np.testing.assert_array_equal(value, [1.0, 0.5, 1.0])


def test_one_class_may_be_reported_and_have_a_threshold_of_its_own(digits, measured):
    logits, labels, weights = digits
    by_class = measured(recall(average=None), logits, labels, weights=weights)
    assert measured(recall(class_id=3), logits, labels, weights=weights) == by_class[3]
    for classes in [3, 5], np.array([3, 5]):
        both = measured(recall(class_id=classes), logits, labels, weights=weights)
        assert both == pytest.approx(by_class[[3, 5]].mean())
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = [
        sklearn.metrics.recall_score(labels == 3, shares[:, 3] > limit, sample_weight=weights)
        for limit in (0.2, 0.5)
    ]
    of_shares = recall(class_id=3, threshold=[0.2, 0.5], from_logits=False)
    value = measured(of_shares, shares, labels, weights=weights)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    of_logits = recall(class_id=3, threshold=[np.log(0.2 / 0.8), 0.0])
    value = measured(of_logits, logits, labels, weights=weights)
    np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize("metric", [recall, true_positives], ids=["recall", "true_positives"])
def test_thresholds_in_an_array_are_those_in_a_list(metric):
    scores = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    labels = np.array([[0, 1, 1], [1, 0, 1], [1, 1, 0], [0, 0, 1]])
    limits = [-0.5, 0.0, 0.5]
    expected = value_of(metric(threshold=limits, multilabel=True), scores, labels)
    value = value_of(metric(threshold=np.array(limits), multilabel=True), scores, labels)
    np.testing.assert_array_equal(value, expected)
    assert value.shape == (3,)
    one = value_of(metric(threshold=np.float32(0.5), multilabel=True), scores, labels)
    assert one == expected[2]


def test_the_k_highest_scores_may_be_predicted(digits, measured):
    logits, labels, weights = digits
    expected = sklearn.metrics.top_k_accuracy_score(labels, logits, k=3, sample_weight=weights)
    value = measured(recall(top_k=3), logits, labels, weights=weights)
    assert value == pytest.approx(expected, rel=1e-6)
    value = measured(precision(top_k=3), logits, np.eye(10)[labels], weights=weights)
    assert value == pytest.approx(expected / 3, rel=1e-6)


def test_masks_of_one_score_are_binary_elements():
    generator = np.random.default_rng(0)
    scores = generator.normal(size=(3, 4, 5)).astype(np.float32)
    masks = (scores + generator.normal(size=scores.shape) > 0).astype(np.uint8)
    expected = sklearn.metrics.jaccard_score(masks.ravel(), scores.ravel() > 0)
    assert value_of(iou(average="binary"), scores, masks) == pytest.approx(expected, rel=1e-6)
    column = scores[..., None], masks[..., None]
    assert value_of(iou, *column) == pytest.approx(expected, rel=1e-6)
    assert value_of(mean_iou, *column) == pytest.approx(value_of(binary_iou, scores, masks))
    for of_yes in binary_iou(class_id=[1]), binary_iou(class_id=1):
        assert value_of(of_yes, scores, masks) == pytest.approx(expected, rel=1e-6)


def test_options_of_classes_that_exclude_each_other_are_refused():
    with pytest.raises(
        ValueError, match="with class_id=1 measures that class alone.*average='macro'"
    ):
        recall(class_id=1, average="macro")
    logits, labels = np.zeros((3, 4)), np.zeros(3, np.int32)
    with pytest.raises(ValueError, match="the highest of 4 scores and uses no threshold"):
        f1(threshold=0.5).measure(logits, labels)
    metric = recall(class_id=4)
    with pytest.raises(ValueError, match="'recall' has no class 4: there are 4, from 0"):
        metric.compute(metric.measure(logits, labels))
    with pytest.raises(ValueError, match="top 5 of 4 classes"):
        recall(top_k=5).measure(logits, labels)
    with pytest.raises(ValueError, match="'recall' has no top_k=0: it must be at least 1"):
        recall(top_k=0)
    with pytest.raises(ValueError, match="'binary_iou' has no class 2: there are 0 and 1"):
        binary_iou(class_id=2)


RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(6, 5, 4)).astype(np.float32)
LABELS = RNG.integers(0, 4, (6, 5))
EXPECTED = sklearn.metrics.jaccard_score(LABELS.ravel(), LOGITS.argmax(-1).ravel(), average="macro")


def test_predicted_labels_are_taken_where_the_number_of_classes_is_given():
    found = value_of(mean_iou(num_classes=4), LOGITS.argmax(-1), LABELS)
    assert found == pytest.approx(EXPECTED, rel=1e-6)
    of_two = value_of(precision(num_classes=2), np.array([1, 1, 0]), np.array([1, 0, 0]))
    assert of_two == 0.5


def test_classes_may_be_on_another_axis():
    moved = np.moveaxis(LOGITS, -1, 1)
    assert value_of(mean_iou(axis=1), moved, LABELS) == pytest.approx(EXPECTED, rel=1e-6)
    onehot = np.moveaxis(np.eye(4)[LABELS], -1, 1)
    by_class = value_of(iou(axis=1, average=None), moved, onehot)
    assert np.mean(by_class) == pytest.approx(EXPECTED, rel=1e-6)


def test_a_predicted_label_that_names_no_class_is_nan():
    assert np.isnan(value_of(f1(num_classes=3), np.array([0, 3]), np.array([0, 1])))


def test_scores_of_another_number_of_classes_are_refused():
    with pytest.raises(ValueError, match=r"num_classes=3, but got outputs of shape \(6, 5, 4\)"):
        value_of(mean_iou(num_classes=3), LOGITS, LABELS)
    with pytest.raises(ValueError, match="'mean_iou' has no num_classes=0: give 1 or more"):
        mean_iou(num_classes=0)
