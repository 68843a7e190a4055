import numpy as np
import pytest
import sklearn.metrics
from measuring import value_of

from flaxfit.metrics import (
    balanced_accuracy,
    cohen_kappa,
    false_negatives,
    false_positives,
    mcc,
    true_negatives,
    true_positives,
)

AGREEMENTS = [
    (balanced_accuracy, sklearn.metrics.balanced_accuracy_score),
    (mcc, sklearn.metrics.matthews_corrcoef),
    (cohen_kappa, sklearn.metrics.cohen_kappa_score),
]
agreements = pytest.mark.parametrize(
    ("metric", "reference"), AGREEMENTS, ids=[metric.name for metric, _ in AGREEMENTS]
)
PARTS = (true_negatives, false_positives, false_negatives, true_positives)


@agreements
def test_agreement_of_classes(digits, tumours, measured, metric, reference):
    logits, labels, weights = digits
    expected = reference(labels, logits.argmax(1), sample_weight=weights)
    assert measured(metric, logits, labels, weights=weights) == pytest.approx(expected, rel=1e-5)
    scores, labels, weights = tumours
    expected = reference(labels, scores > 1, sample_weight=weights)
    value = measured(metric(threshold=1.0), scores, labels, weights=weights)
    assert value == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("how", ["linear", "quadratic"])
def test_kappa_of_grades(digits, measured, how):
    logits, labels, weights = digits
    expected = sklearn.metrics.cohen_kappa_score(
        labels, logits.argmax(1), weights=how, sample_weight=weights
    )
    value = measured(cohen_kappa(kappa_weights=how), logits, labels, weights=weights)
    assert value == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="'linear', 'quadratic' or None, got 'cubic'"):
        cohen_kappa(kappa_weights="cubic")


@agreements
def test_agreement_of_nothing_is_not_a_number(metric, reference):
    logits, labels = np.eye(3)[[0, 1]], np.array([0, 1])
    assert np.isnan(value_of(metric, logits, labels, weights=np.zeros(2)))
    assert value_of(mcc, logits, np.ones(2, int)) == 0


def test_numbers_of_answers(tumours, measured):
    scores, labels, weights = tumours
    expected = sklearn.metrics.confusion_matrix(labels, scores > 0, sample_weight=weights)
    value = [measured(part, scores, labels, weights=weights) for part in PARTS]
    np.testing.assert_allclose(value, expected.ravel(), rtol=1e-5)
    limits = [-1.0, 0.0, 1.0]
    value = measured(true_positives(thresholds=limits), scores, labels, weights=weights)
    expected = [(weights * labels * (scores > limit)).sum() for limit in limits]
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_numbers_of_answers_by_class(digits, measured):
    logits, labels, weights = digits
    matrices = sklearn.metrics.multilabel_confusion_matrix(
        labels, logits.argmax(1), sample_weight=weights
    )
    for part, expected in zip(PARTS, matrices.reshape(-1, 4).T, strict=True):
        value = measured(part(average=None), logits, labels, weights=weights)
        np.testing.assert_allclose(value, expected, rtol=1e-4)
        whole = measured(part, logits, labels, weights=weights)
        assert whole == pytest.approx(expected.sum(), rel=1e-4)
        assert measured(part(class_id=2), logits, labels, weights=weights) == value[2]
    with pytest.raises(ValueError, match="'true_positives' must be 'micro' or None, got 'macro'"):
        true_positives(average="macro")
