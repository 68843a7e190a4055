import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from marks import quick, slow, thorough
from measuring import value_of
from sklearn.metrics import average_precision_score, roc_auc_score

from flaxfit.metrics import auc, average_precision


def test_the_area_is_exact_where_scores_fall_into_different_bins_or_are_tied(measured):
    generator = np.random.default_rng(0)
    scores = generator.choice(np.linspace(-8, 8, 40), 500).astype(np.float32)
    labels = (scores + generator.normal(0, 5, 500) > 0).astype(np.int32)
    weights = generator.uniform(size=500).astype(np.float32)
    expected = roc_auc_score(labels, scores, sample_weight=weights)
    assert measured(auc, scores, labels, weights=weights) == pytest.approx(expected, rel=1e-6)


def test_few_bins_err_by_at_most_half_the_pairs_that_share_the_first_bits(tumours, measured):
    scores, labels, _ = tumours
    heads = (scores + 0.0).view(np.uint32) >> 20
    shared = np.mean(heads[labels == 1][:, None] == heads[labels == 0])
    error = abs(measured(auc(n_bins=20), scores, labels) - roc_auc_score(labels, scores))
    assert 1e-5 < error <= shared / 2


NORMAL = np.random.default_rng(0).normal(size=1100)
LABELS = (NORMAL + np.random.default_rng(1).normal(size=1100) > 0).astype(np.int32)
PLACES = np.random.default_rng(2).integers(0, 200, 1100)
SCORES = {
    "large": 1e4 * NORMAL,
    "huge": 1e30 * NORMAL,
    "tiny": 1e-30 * NORMAL,
    "shifted": 5000 + NORMAL,
    "narrow": 1000 + 0.03 * NORMAL,
    "a few floats apart": -1000 + 1e-3 * NORMAL,
    "probabilities": 1 / (1 + np.exp(-20 * NORMAL)),
    "two narrow places": np.where(PLACES % 2, 1000 + 0.03 * NORMAL, 20 + 0.01 * NORMAL),
    "many narrow places": 100 * PLACES + 0.001 * NORMAL,
    "narrow beside wide": np.where((PLACES % 2) & (LABELS == 0), 5000 * NORMAL, 1000 + NORMAL),
    "tied": np.round(NORMAL),
    "constant": 0 * NORMAL + 7,
    "with infinities": np.where(PLACES < 9, np.inf * np.sign(NORMAL), NORMAL),
}


@pytest.mark.parametrize("of", quick("narrow beside wide", of=SCORES))
def test_the_area_is_within_a_thousandth_whatever_the_size_and_spread_of_scores(of, measured):
    scores = SCORES[of].astype(np.float32)
    ranks = np.unique(scores, return_inverse=True)[1]  # Of infinities, too.
    assert measured(auc, scores, LABELS) == pytest.approx(roc_auc_score(LABELS, ranks), abs=5e-4)


@pytest.mark.slow
def test_float64_scores_are_ranked_by_all_their_digits():
    scores = 1e9 + 1e-4 * NORMAL[:999]
    with jax.enable_x64(True):
        value = value_of(auc, scores, LABELS[:999])
    assert value == pytest.approx(roc_auc_score(LABELS[:999], scores), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, thorough(jnp.float16)])
def test_half_precision_scores_of_two_classes_are_subtracted_in_single_precision(dtype):
    scores = jnp.stack([jnp.zeros(999), 100 + NORMAL[:999]], 1).astype(dtype)
    value = value_of(auc, scores, LABELS[:999])
    expected = roc_auc_score(LABELS[:999], np.asarray(scores, np.float32)[:, 1])
    assert value == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_zero_has_no_sign_infinities_are_ends_and_nan_and_one_class_alone_have_no_area():
    assert value_of(auc, np.array([0.0, -0.0]), np.array([0, 1])) == pytest.approx(0.5)
    scores = np.array([-np.inf, -5.0, 100.0, np.inf])
    assert value_of(auc, scores, np.array([0, 0, 0, 1])) == 1.0
    assert value_of(auc, scores, np.array([1, 0, 0, 0])) == 0.0
    assert np.isnan(value_of(auc, np.array([np.nan, 1.0]), np.array([0, 1])))
    assert np.isnan(value_of(auc, np.array([0.3, 1.0]), np.array([1, 1])))


def test_two_classes_are_ranked_by_the_difference_of_their_scores(tumours, measured):
    scores, labels, weights = tumours
    of_one = measured(auc, scores[:, None], labels, weights=weights)
    assert of_one == pytest.approx(roc_auc_score(labels, scores, sample_weight=weights), abs=5e-5)
    two_scores = np.stack([-scores / 2, scores / 2], axis=1)
    of_two = measured(auc, two_scores, labels, weights=weights)
    assert of_two == pytest.approx(of_one, rel=1e-7)


def test_what_cannot_be_ranked_is_refused():
    with pytest.raises(ValueError, match=r"got outputs \(4, 3\) and labels \(4,\)"):
        auc.measure(np.zeros((4, 3)), np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="at least 2 bins, got n_bins=1"):
        auc(n_bins=1)


OF_SEVERAL = pytest.mark.parametrize(
    ("metric", "reference"),
    [slow(auc, roc_auc_score), (average_precision, average_precision_score)],
    ids=["auc", "average_precision"],
)


@pytest.mark.slow
@OF_SEVERAL
def test_classes_are_ranked_one_against_the_others(digits, measured, metric, reference):
    logits, labels, weights = digits
    shares = scipy.special.softmax(logits.astype(float), -1)
    actual, near = np.eye(10)[labels], pytest.approx
    found = measured if metric is auc else value_of  # Rows are joined, not added.
    for average in "macro", "weighted":
        expected = near(reference(actual, shares, average=average, sample_weight=weights), abs=5e-4)
        ranked = metric(multi_class="ovr", average=average)
        assert found(ranked, logits, labels, weights=weights) == expected
        if average == "macro":
            whole = np.asarray(actual, np.float32)
            assert found(ranked, logits, whole, weights=weights) == expected
    expected = reference(actual, shares, average=None)
    ranked = metric(multi_class="ovr", average=None, from_logits=False)
    value = found(ranked, shares.astype(np.float32), labels)
    np.testing.assert_allclose(value, expected, atol=5e-4)


@OF_SEVERAL
def test_labels_are_ranked_each_by_its_own_score(measured, metric, reference):
    scores = NORMAL[:300].reshape(100, 3).astype(np.float32)
    found = measured if metric is auc else value_of
    labels, weights = LABELS[:300].reshape(100, 3).copy(), np.abs(NORMAL[:100]).astype(np.float32)
    for average in "macro", "weighted":
        expected = reference(labels, scores, average=average, sample_weight=weights)
        value = found(metric(multilabel=True, average=average), scores, labels, weights=weights)
        assert value == pytest.approx(expected, abs=5e-5)
    labels[:, 1] = 0
    left = reference(labels[:, ::2], scores[:, ::2])
    assert found(metric(multi_label=True), scores, labels) == pytest.approx(left, abs=5e-5)
    scores[0, 0] = np.nan
    assert np.isnan(value_of(metric(multilabel=True), scores, labels))


@pytest.mark.parametrize("metric", [thorough(auc), average_precision])
def test_certain_logits_are_ranked_and_probabilities_are_not_taken_for_logits(metric):
    logits = np.float32([[40, 0, 0], [30, 0, 0], [20, 0, 0], [0, 1, 2]])
    value = value_of(metric(multi_class="ovr", average=None), logits, np.array([0, 0, 1, 2]))
    assert value[0] == value[2] == 1
    ranked = metric(multi_class="ovr")
    shares = np.tile(np.float32([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]]), (6, 1))
    with pytest.warns(UserWarning, match=r"takes logits.*from_logits=False"):
        value_of(ranked, shares, np.arange(12) % 3)
    two, labels = np.stack([-NORMAL, NORMAL], 1)[:50], LABELS[:50]
    assert value_of(ranked, two, labels) == value_of(metric, two, labels)


@pytest.mark.parametrize("metric", [auc, average_precision])
def test_options_for_several_classes_that_do_not_fit_are_refused(metric):
    with pytest.raises(ValueError, match=r"labels \(4,\). Of more classes, say multi_class='ovr'"):
        metric.measure(np.zeros((4, 3)), np.zeros(4, np.int32))
    with pytest.raises(ValueError, match=r"'ovr' \(each class against .* or None, got 'ovo'"):
        metric(multi_class="ovo")
    with pytest.raises(ValueError, match="must be 'macro', 'weighted' or None, got 'micro'"):
        metric(average="micro")
    with pytest.raises(ValueError, match="weigh the areas of several labels: pass multilabel"):
        metric(label_weights=[1.0, 2.0])
    with pytest.raises(ValueError, match="or several labels .multilabel=True.: pass one"):
        metric(multilabel=True, multi_class="ovr")
    with pytest.raises(ValueError, match=r"\(batch, labels\), got outputs \(4,\)"):
        metric(multilabel=True).measure(np.zeros(4), np.zeros(4))
