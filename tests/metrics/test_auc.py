import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from flaxfit.metrics import auc


def test_the_area_agrees_with_scikit_learn_to_four_digits(tumours, measured):
    scores, labels, weights = tumours
    expected = roc_auc_score(labels, scores, sample_weight=weights)
    assert measured(auc, scores, labels, weights=weights) == pytest.approx(expected, abs=5e-5)


def test_the_area_is_exact_where_scores_fall_into_different_bins_or_are_tied(measured):
    generator = np.random.default_rng(0)
    scores = generator.choice(np.linspace(-8, 8, 40), 500).astype(np.float32)
    labels = (scores + generator.normal(0, 5, 500) > 0).astype(np.int32)
    weights = generator.uniform(size=500).astype(np.float32)
    expected = roc_auc_score(labels, scores, sample_weight=weights)
    assert measured(auc, scores, labels, weights=weights) == pytest.approx(expected, rel=1e-6)


def test_few_bins_err_by_at_most_half_the_pairs_that_share_one(tumours, measured):
    scores, labels, _ = tumours
    bins = np.clip(((scores / (1 + abs(scores)) + 1) * 10).astype(int), 0, 19)
    shared = np.mean(bins[labels == 1][:, None] == bins[labels == 0])
    error = abs(measured(auc(n_bins=20), scores, labels) - roc_auc_score(labels, scores))
    assert 1e-5 < error <= shared / 2


def test_two_classes_are_ranked_by_the_difference_of_their_scores(tumours, measured):
    scores, labels, weights = tumours
    two_scores = np.stack([-scores / 2, scores / 2], axis=1)
    assert measured(auc, two_scores, labels, weights=weights) == pytest.approx(
        measured(auc, scores[:, None], labels, weights=weights), rel=1e-7
    )


def test_infinite_scores_rank_first_and_last():
    scores = np.array([-np.inf, -5.0, 100.0, np.inf])
    assert auc.compute(auc.measure(scores, np.array([0, 0, 0, 1]))) == 1.0
    assert auc.compute(auc.measure(scores, np.array([1, 0, 0, 0]))) == 0.0


def test_a_nan_score_that_has_weight_is_not_hidden():
    assert np.isnan(auc.compute(auc.measure(np.array([np.nan, 1.0]), np.array([0, 1]))))


def test_one_class_alone_has_no_area():
    assert np.isnan(auc.compute(auc.measure(np.array([0.3, 1.0]), np.array([1, 1]))))


def test_what_cannot_be_ranked_is_refused():
    with pytest.raises(ValueError, match=r"got outputs \(4, 3\) and labels \(4,\)"):
        auc.measure(np.zeros((4, 3)), np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="at least 2 bins, got n_bins=1"):
        auc(n_bins=1)
