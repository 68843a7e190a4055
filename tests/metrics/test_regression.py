import numpy as np
import pytest
import sklearn.metrics

from flaxfit.metrics import mae, mse, perplexity, r2, rmse


@pytest.mark.parametrize(
    ("metric", "reference"),
    [
        (mse, sklearn.metrics.mean_squared_error),
        (mae, sklearn.metrics.mean_absolute_error),
        (rmse, sklearn.metrics.root_mean_squared_error),
        (r2, sklearn.metrics.r2_score),
    ],
    ids=["mse", "mae", "rmse", "r2"],
)
def test_regression_metrics_agree_with_scikit_learn(diabetes, measured, metric, reference):
    outputs, targets, weights = diabetes
    expected = reference(targets, outputs, sample_weight=weights)
    assert measured(metric, outputs, targets, weights=weights) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("metric", "reference"),
    [(mse, sklearn.metrics.mean_squared_error), (r2, sklearn.metrics.r2_score)],
    ids=["mse", "r2"],
)
def test_several_outputs_count_the_same(diabetes, measured, metric, reference):
    outputs, targets, weights = diabetes
    outputs, targets = np.stack([outputs, outputs + 9], 1), np.stack([targets, targets], 1)
    expected = reference(targets, outputs, sample_weight=weights)
    assert measured(metric, outputs, targets, weights=weights) == pytest.approx(expected, rel=1e-6)


def test_a_center_keeps_the_digits_of_targets_far_from_zero(measured):
    generator = np.random.default_rng(0)
    years = generator.normal(2000, 2, 700).astype(np.float32)
    guesses = (years + generator.normal(0, 1, 700)).astype(np.float32)
    expected = sklearn.metrics.r2_score(years, guesses)
    assert measured(r2(center=2000.0), guesses, years) == pytest.approx(expected, rel=1e-5)


def test_errors_of_unsigned_integers_do_not_wrap_around():
    sums = mse.measure(np.array([1], np.uint8), np.array([3], np.uint8))
    assert mse.compute(sums) == 4.0


def test_regression_refuses_shapes_that_would_broadcast():
    for metric in (mse, mae, rmse, r2):
        with pytest.raises(ValueError, match=r"got outputs \(4, 1\) and targets \(4,\)"):
            metric.measure(np.zeros((4, 1)), np.zeros(4))


def test_perplexity_is_the_exponential_of_the_mean_crossentropy(digits, measured):
    logits, labels, weights = digits
    likelihoods = np.exp(logits.astype(np.float64))
    probabilities = likelihoods / likelihoods.sum(1, keepdims=True)
    expected = np.exp(sklearn.metrics.log_loss(labels, probabilities, sample_weight=weights))
    for targets in (labels, np.eye(10, dtype=np.float32)[labels]):
        value = measured(perplexity, logits, targets, weights=weights)
        assert value == pytest.approx(expected, rel=1e-5)


def test_a_hopeless_perplexity_is_infinite_quietly():
    assert perplexity.compute(perplexity.measure(np.array([[0.0, 1e4]]), np.array([0]))) == np.inf


def test_no_weight_gives_nan_quietly(diabetes):
    outputs, targets, weights = diabetes
    for metric in (mse, mae, rmse, r2):
        assert np.isnan(metric.compute(metric.measure(outputs, targets, weights=0 * weights)))
