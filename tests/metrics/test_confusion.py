import numpy as np
import pytest
import sklearn.metrics
from measuring import value_of

from flaxfit.metrics import confusion_matrix, f1, plot_confusion_matrix, precision, recall

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
    with pytest.raises(ValueError, match=r"'f1' wants labels of the shape.*\(3, 5\).*\(3,\)"):
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


def test_the_confusion_matrix_has_actual_classes_in_rows(digits, measured):
    logits, labels, weights = digits
    expected = sklearn.metrics.confusion_matrix(labels, logits.argmax(1), sample_weight=weights)
    value = measured(confusion_matrix(10), logits, labels, weights=weights)
    np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize("label", [-1, 3])
def test_labels_out_of_range_are_no_other_class(label):
    logits, labels = np.eye(3)[[0, 1, 2, 2]], np.array([0, 1, 2, label])
    matrix, weights = confusion_matrix(3), np.array([1.0, 1, 1, 0])
    np.testing.assert_array_equal(value_of(matrix, logits, labels, weights=weights), np.eye(3))
    for metric in matrix, precision, recall, f1(average="micro"), f1(average="weighted"):
        with pytest.warns(UserWarning, match="labels that name no class.*the weight 0"):
            assert np.isnan(value_of(metric, logits, labels)).all()


def test_a_confusion_matrix_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"of 10 classes does not fit outputs of shape \(4, 3\)"):
        confusion_matrix(10).measure(np.zeros((4, 3)), np.zeros(4, np.int32))


def test_a_drawn_matrix_has_a_number_in_each_cell_and_the_shares_of_rows_as_colours():
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    matplotlib.use("Agg")
    matrix = np.array([[30.0, 10.0, 0.0], [0.0, 0.0, 0.0], [1.5, 0.0, 1.5]], np.float32)
    axes = plot_confusion_matrix(matrix, names=["cat", "dog", "a llama"])
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["30", "10", "0", "0", "0", "0", "1.5", "0", "1.5"]
    shares = axes.images[0].get_array()
    np.testing.assert_allclose(shares, [[0.75, 0.25, 0], [0, 0, 0], [0.5, 0, 0.5]])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog", "a llama"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "actual")
    matplotlib.pyplot.close(axes.figure)


def test_what_is_no_confusion_matrix_is_not_drawn():
    with pytest.raises(ValueError, match=r"as many rows as columns, got an array of shape \(3,\)"):
        plot_confusion_matrix(np.ones(3))
    with pytest.raises(ValueError, match="There are 2 classes, but 1 names: cat"):
        plot_confusion_matrix(np.eye(2), names=["cat"])
