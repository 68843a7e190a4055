import numpy as np
import pytest
import sklearn.metrics
from measuring import value_of

from flaxfit.metrics import confusion_matrix, f1, plot_confusion_matrix, precision, recall


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
        with pytest.warns(UserWarning, match="labels are not valid classes.*the weight 0"):
            assert np.isnan(value_of(metric, logits, labels)).all()


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


def test_a_matrix_may_hold_shares(digits, measured):
    logits, labels, weights = digits
    for how in "true", "pred", "all":
        expected = sklearn.metrics.confusion_matrix(
            labels, logits.argmax(1), sample_weight=weights, normalize=how
        )
        value = measured(confusion_matrix(normalize=how), logits, labels, weights=weights)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    with pytest.raises(ValueError, match="'true', 'pred', 'all' or None, got 'rows'"):
        confusion_matrix(normalize="rows")
    with pytest.raises(ValueError, match=r"of 7 classes does not fit outputs of shape \(401, 10\)"):
        confusion_matrix(7).measure(logits, labels)


def test_a_label_and_the_name_are_options(measured):
    logits, labels = np.eye(3)[[0, 1, 2, 0]], np.array([0, 2, -1, -1])
    metric = confusion_matrix(3, ignore_label=-1, name="matrix")
    assert metric.name == "matrix"
    np.testing.assert_array_equal(
        measured(metric, logits, labels), measured(confusion_matrix(3), logits[:2], labels[:2])
    )
    with pytest.raises(TypeError, match="'confusion_matrix' has no option ignore"):
        confusion_matrix(3, ignore=-1)
