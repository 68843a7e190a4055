import numpy as np
import pytest
from marks import slow
from measuring import value_of

from flaxfit.metrics import brier, calibration_error, log_loss

SHARES = np.float32([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]])
LABELS = np.array([0, 2, 2])
WEIGHTS = np.float32([1, 2, 1])
OF_LABEL = np.array([0.7, 0.3, 0.4])
SQUARES = np.square(SHARES - np.eye(3)[LABELS]).sum(1)


@pytest.mark.parametrize(
    ("metric", "each"),
    [(log_loss, -np.log(OF_LABEL)), slow(brier, SQUARES)],
    ids=["log_loss", "brier"],
)
def test_values_of_classes_are_those_of_each_example(metric, each):
    expected = pytest.approx(np.average(each, weights=WEIGHTS))
    for labels in LABELS, np.eye(3, dtype=np.float32)[LABELS]:
        assert value_of(metric, np.log(SHARES), labels, weights=WEIGHTS) == expected
    found = value_of(metric(from_logits=False), SHARES, LABELS, weights=WEIGHTS)
    assert found == expected


@pytest.mark.parametrize(
    ("metric", "each"),
    [slow(log_loss, lambda of: -np.log(of)), (brier, lambda of: (1 - of) ** 2)],
    ids=["log_loss", "brier"],
)
def test_values_of_two_classes_are_those_of_a_single_score(metric, each):
    shares, labels = np.float32([0.9, 0.2, 0.6]), np.array([1, 0, 0])
    expected = pytest.approx(each(np.array([0.9, 0.8, 0.4])).mean())
    score = np.log(shares / (1 - shares))
    assert value_of(metric, score, labels) == expected
    assert value_of(metric(from_logits=False), shares, labels) == expected
    assert value_of(metric, np.stack([0 * score, score], 1), labels) == expected


@pytest.mark.slow
def test_certain_logits_lose_no_digits():
    assert value_of(log_loss, np.float32([-200]), np.array([1])) == 200
    assert value_of(log_loss, np.float32([[300, 0]]), np.array([1])) == 300


def test_confidence_is_compared_with_accuracy_by_bin():
    shares, labels = np.float32([[0.9, 0.1], [0.8, 0.2], [0.35, 0.65]]), np.array([0, 1, 1])
    metric = calibration_error(n_bins=2, from_logits=False)  # All in the upper bin.
    assert value_of(metric, shares, labels) == pytest.approx(abs(2.35 - 2) / 3)
    metric = calibration_error(n_bins=10, from_logits=False)  # Each in one of its own.
    expected = (0.1 + 0.8 + 0.35) / 3
    assert value_of(metric, shares, labels) == pytest.approx(expected)
    value = value_of(metric, shares, labels, weights=WEIGHTS)
    assert value == pytest.approx((0.1 + 2 * 0.8 + 0.35) / 4)
    score = np.log(shares[:, 1] / shares[:, 0])  # Class 1 of a single score.
    assert value_of(calibration_error(n_bins=10), score, labels) == pytest.approx(expected)


@pytest.mark.parametrize("metric", [slow(log_loss), slow(brier), calibration_error])
def test_invalid_labels_and_outputs_are_not_numbers_unless_they_have_no_weight(metric):
    logits, labels = np.log(SHARES), np.array([0, 2, 3])
    with pytest.warns(UserWarning, match=f"{metric.name!r} is NaN.*labels are not valid classes"):
        assert np.isnan(value_of(metric, logits, labels))
    idle = np.float32([1, 1, 0])
    expected = value_of(metric, logits[:2], LABELS[:2])
    assert value_of(metric, logits, labels, weights=idle) == pytest.approx(expected)
    with pytest.warns(UserWarning, match="outputs below 0 or above 1"):
        assert np.isnan(value_of(metric(from_logits=False), logits, LABELS))
    with pytest.raises(ValueError, match=r"for outputs of shape \(3, 3\), got labels \(2,\)"):
        metric.measure(logits, LABELS[:2])
