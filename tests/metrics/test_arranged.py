import numpy as np
import pytest
import sklearn.metrics
from measuring import value_of

from flaxfit.metrics import f1, iou, mean_iou, precision

GENERATOR = np.random.default_rng(0)
LOGITS = GENERATOR.normal(size=(6, 5, 4)).astype(np.float32)
LABELS = GENERATOR.integers(0, 4, (6, 5))
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
