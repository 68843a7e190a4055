import numpy as np
import pytest
from marks import slow
from measuring import value_of

from flaxfit.metrics import (
    average_precision,
    max_error,
    median_absolute_error,
    pr_auc,
    precision_at_recall,
    recall_at_precision,
    sensitivity_at_specificity,
    spearman,
    specificity_at_sensitivity,
)

# From the top: right, wrong, then two equal scores of which one is right, and wrong.
SCORES, LABELS = np.float32([0.5, 3, 2, 1, 1]), np.array([0, 1, 0, 1, 0])
WEIGHTS = np.float32([1, 2, 1, 1, 3])
CURVES = (average_precision, pr_auc, precision_at_recall, specificity_at_sensitivity)


def test_precision_is_averaged_over_the_steps_of_recall():
    assert value_of(average_precision, SCORES, LABELS) == pytest.approx((1 + 2 / 4) / 2)
    value = value_of(average_precision, SCORES, LABELS, weights=WEIGHTS)
    assert value == pytest.approx((2 * 1 + 1 * 3 / 7) / 3)


def test_the_area_of_precision_is_that_of_trapezoids():
    # Precision by recall: 1 at 0 and 1/2, then 1/2 there, and 1/2 at 1.
    assert value_of(pr_auc, SCORES, LABELS) == pytest.approx(1 / 2 + 1 / 4)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (precision_at_recall, 1),
        (precision_at_recall(least=0.9), 2 / 4),
        (recall_at_precision(least=0.9), 1 / 2),
        (recall_at_precision, 1),
        (sensitivity_at_specificity(least=0.9), 1 / 2),
        (sensitivity_at_specificity(least=0.3), 1),
        (specificity_at_sensitivity, 1),
        (specificity_at_sensitivity(least=0.9), 1 / 3),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_the_best_of_a_rate_where_another_reaches_its_bound(metric, expected):
    assert value_of(metric, SCORES, LABELS) == pytest.approx(expected)


def test_errors_of_the_middle_and_the_largest():
    outputs = np.float32([1, -2, 3, 10])
    assert value_of(median_absolute_error, outputs, np.zeros(4)) == 2.5
    weights = np.float32([1, 1, 4, 0])
    assert value_of(median_absolute_error, outputs, np.zeros(4), weights=weights) == 3
    assert value_of(max_error, outputs, np.ones(4)) == 9
    assert value_of(max_error, outputs, np.ones(4), weights=weights) == 3


def test_ranks_are_correlated_whatever_the_distances():
    numbers = np.float32([1, 2, 3, 4])
    assert value_of(spearman, numbers**5, numbers) == pytest.approx(1)
    assert value_of(spearman, -np.exp(numbers), numbers) == pytest.approx(-1)
    tied = np.corrcoef([1, 2.5, 2.5, 4], [1, 2, 3, 4])[0, 1]
    assert value_of(spearman, np.float32([0, 7, 7, 8]), numbers) == pytest.approx(tied)
    assert np.isnan(value_of(spearman, np.ones(4, np.float32), numbers))


@pytest.mark.parametrize(
    "metric", [CURVES[0], *map(slow, (*CURVES[1:], max_error, median_absolute_error)), spearman]
)
def test_rows_without_weight_leave_no_mark_and_others_that_are_nan_do(metric):
    scores, labels = np.append(SCORES, np.nan), np.append(LABELS, 1)
    idle = np.float32([1, 1, 1, 1, 1, 0])
    expected = value_of(metric, SCORES, LABELS)
    assert value_of(metric, scores, labels, weights=idle) == pytest.approx(expected)
    assert np.isnan(value_of(metric, scores, labels))
    assert np.isnan(value_of(metric, SCORES, LABELS, weights=np.zeros(5)))


@pytest.mark.parametrize("metric", [average_precision, pr_auc])
def test_without_positives_there_is_no_precision(metric):
    assert np.isnan(value_of(metric, SCORES, 0 * LABELS))


def test_what_has_no_single_score_is_refused():
    for metric in CURVES:
        with pytest.raises(ValueError, match=rf"{metric.name}' expects a single score .*\(4, 3\)"):
            metric.measure(np.zeros((4, 3)), np.zeros(4, np.int32))
    with pytest.raises(ValueError, match=r"outputs \(4, 1\) and targets \(4,\): reshape"):
        spearman.measure(np.zeros((4, 1)), np.zeros(4))


def test_a_rate_at_another_is_of_one_class_of_several():
    logits = np.float32([[2, 1, 0], [0, 2, 1], [1, 0, 2], [0, 1, 3]])
    labels = np.array([0, 1, 1, 2])
    share = np.exp(logits[:, 2]) / np.exp(logits).sum(-1)
    expected = value_of(precision_at_recall, np.log(share / (1 - share)), labels == 2)
    assert value_of(precision_at_recall(class_id=2), logits, labels) == expected == 1.0
    with pytest.raises(ValueError, match="with multilabel=True pass class_id=0"):
        precision_at_recall(multilabel=True)
