import itertools

import numpy as np
import pytest
from marks import slow
from measuring import value_of
from sklearn.metrics import ndcg_score

from flaxfit.metrics import as_metrics, mrr, ndcg, precision_at_k, recall_at_k

# By score: items 2, 0, 1, 3; and 3, 2, 1, 0.
SCORES = np.float32([[0.6, 0.5, 0.9, 0.1], [0.1, 0.2, 0.3, 0.4]])
GRADES = np.float32([[3, 0, 0, 1], [0, 2, 0, 0]])
FOUND = 1 / np.log2([2, 3, 4, 5])  # What a gain counts by its place.


def test_gains_are_discounted_by_place_and_compared_with_the_best_order():
    best = 3 * FOUND[0] + FOUND[1], 2 * FOUND[0]
    expected = (3 * FOUND[1] + FOUND[3]) / best[0], 2 * FOUND[2] / best[1]
    for weights in np.array([[1, 1], [3, 1]], np.float32):
        value = value_of(ndcg, SCORES, GRADES, weights=weights)
        assert value == pytest.approx(np.average(expected, weights=weights))
    expected = 3 * FOUND[1] / best[0], 0
    assert value_of(as_metrics("ndcg@2")["ndcg@2"], SCORES, GRADES) == pytest.approx(
        np.mean(expected)
    )


@pytest.mark.parametrize(
    ("metric", "of_grades", "of_numbers"),
    [
        (mrr, (1 / 2 + 1 / 3) / 2, (1 / 4 + 1) / 2),
        (precision_at_k(k=2), 1 / 4, 1 / 4),
        (recall_at_k(k=2), 1 / 4, 1 / 2),
        (recall_at_k, 1, 1),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_relevant_items_are_those_of_a_grade_above_zero_or_of_a_number(
    metric, of_grades, of_numbers
):
    assert value_of(metric, SCORES, GRADES) == pytest.approx(of_grades)
    assert value_of(metric, SCORES, np.array([3, 3])) == pytest.approx(of_numbers)


@pytest.mark.parametrize("metric", [ndcg, *map(slow, (mrr, precision_at_k, recall_at_k))])
def test_items_of_the_ignored_label_and_rows_of_them_alone_do_not_count(metric):
    padded = np.c_[SCORES, np.float32([[7.0], [np.nan]])]
    padded, grades = np.r_[padded, padded], np.c_[GRADES, [[-1.0], [-1.0]]]
    grades = np.r_[grades, np.full_like(grades, -1)]
    expected = value_of(metric(k=2), SCORES, GRADES)
    assert value_of(metric(k=2, ignore_label=-1), padded, grades) == pytest.approx(expected)
    assert np.isnan(value_of(metric, padded, np.r_[GRADES, GRADES] @ np.eye(4, 5)))


def test_rows_of_an_ignored_number_do_not_count():
    assert value_of(mrr(ignore_label=-1), SCORES, np.array([-1, 2])) == pytest.approx(1 / 2)


def over_all_orders(metric, scores, relevance):
    """The mean over all orders of equal scores, each made strict by its order."""
    orders = np.array(list(itertools.permutations(range(len(scores))))) / 100
    each = np.float32(scores) + orders.astype(np.float32)
    return value_of(metric, each, np.tile(np.float32(relevance), (len(orders), 1)))


@pytest.mark.parametrize("name", ["mrr", slow("mrr@2"), "recall@2", slow("precision@3")])
def test_equal_scores_count_as_all_their_orders_do(name):
    (metric,) = as_metrics(name).values()
    scores = np.float32([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [2, 1, 1, 1, 0]])
    grades = np.float32([[0, 2, 0, 1, 0], [0, 0, 0, 1, 1], [0, 1, 1, 0, 1]])
    expected = np.mean(
        [over_all_orders(metric, *each) for each in zip(scores, grades, strict=True)]
    )
    assert value_of(metric, scores, grades) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("k", [None, slow(3)])
def test_gains_of_equal_scores_are_those_of_scikit_learn(k):
    generator = np.random.default_rng(0)
    scores, grades = generator.integers(0, 3, (2, 20, 7)).astype(np.float32)
    expected = ndcg_score(grades, scores, k=k, ignore_ties=False)
    assert value_of(ndcg(k=k), scores, grades) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("metric", [ndcg, slow(recall_at_k)])
def test_targets_below_zero_and_items_that_are_not_there_are_refused(metric):
    for targets in -GRADES, np.array([0, 4]):
        with pytest.raises(ValueError, match="negative targets, or indices of items that do not"):
            value_of(metric, SCORES, targets)
    weights = np.float32([0, 1])
    assert value_of(metric, SCORES, GRADES * np.float32([[-1], [1]]), weights=weights) > 0


def test_nothing_relevant_is_no_gain():
    for metric in ndcg, mrr, precision_at_k, recall_at_k:
        assert value_of(metric, SCORES, np.zeros_like(GRADES)) == 0


def test_what_is_no_ranking_is_refused():
    with pytest.raises(ValueError, match="first 0 items: k must be at least 1"):
        ndcg(k=0)
    with pytest.raises(ValueError, match=r"outputs of shape \(2, 4\), got labels \(2, 3\)"):
        mrr.measure(SCORES, np.zeros((2, 3)))
