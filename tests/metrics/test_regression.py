import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics
from marks import slow
from measuring import value_of

from flaxfit.metrics import as_metrics, cosine_similarity, mae, mse, perplexity, r2, rmse


@pytest.mark.parametrize(
    ("metric", "reference", "n_outputs"),
    [
        (mse, sklearn.metrics.mean_squared_error, (1, 2)),
        (mae, sklearn.metrics.mean_absolute_error, (1,)),
        (rmse, sklearn.metrics.root_mean_squared_error, (1,)),
        (r2, sklearn.metrics.r2_score, (1, 2)),
    ],
    ids=["mse", "mae", "rmse", "r2"],
)
def test_errors_of_one_and_of_several_outputs_are_those_of_scikit_learn(
    diabetes, measured, metric, reference, n_outputs
):
    outputs, targets, weights = diabetes
    for n in n_outputs:
        if n == 2:
            outputs, targets = np.stack([outputs, outputs + 9], 1), np.stack([targets, targets], 1)
        expected = reference(targets, outputs, sample_weight=weights)
        value = measured(metric, outputs, targets, weights=weights)
        assert value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("is_weighted", [False, True], ids=["equal", "weighted"])
@pytest.mark.parametrize(
    ("mean", "deviation"), [(2000, 2), (1e5, 1), (-1e5, 100), (1e7, 3), (1e3, 1e-3), (1e-9, 1e-12)]
)
def test_r2_keeps_the_digits_of_targets_far_from_zero(measured, mean, deviation, is_weighted):
    generator = np.random.default_rng(0)
    targets = generator.normal(mean, deviation, 700).astype(np.float32)
    guesses = (targets + generator.normal(0, deviation / 2, 700)).astype(np.float32)
    weights = generator.uniform(size=700).astype(np.float32) if is_weighted else None
    wide = targets.astype(float), guesses.astype(float)
    expected = sklearn.metrics.r2_score(*wide, sample_weight=weights)
    assert measured(r2, guesses, targets, weights=weights) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("constant", [0.0, 5.3, 1e5 + 0.3])
@pytest.mark.parametrize("error", [0.0, 1.0])
def test_r2_of_a_constant_target(measured, constant, error):
    targets = np.full(300, constant, np.float32)
    weights = np.random.default_rng(0).uniform(size=300).astype(np.float32)
    # As scikit-learn has it, but for its rounding.
    assert measured(r2, targets + np.float32(error), targets, weights=weights) == 1 - error
    both = np.stack([targets, np.arange(300)], 1).astype(np.float32)
    of_numbers = sklearn.metrics.r2_score(both[:, 1], both[:, 1] + error, sample_weight=weights)
    value = measured(r2, both + np.float32(error), both, weights=weights)
    assert value == pytest.approx((1 - error + of_numbers) / 2, rel=1e-6)


def test_r2_by_output_by_variance_and_adjusted(diabetes):
    outputs, targets, _ = diabetes
    outputs, targets = np.stack([outputs, 0 * outputs], 1), np.stack([targets, 2 * targets], 1)
    sums = jax.device_get(jax.jit(r2.measure)(outputs, targets))  # Options change none of them.
    by_output = r2(average=None).compute(sums)
    np.testing.assert_allclose(
        by_output, sklearn.metrics.r2_score(targets, outputs, multioutput="raw_values"), rtol=1e-5
    )
    by_variance = r2(class_aggregation="variance_weighted_average").compute(sums)
    assert by_variance == pytest.approx((by_output * [1, 4]).sum() / 5, rel=1e-5)
    n = len(targets)
    adjusted = r2(average=None, num_regressors=3).compute(sums)
    np.testing.assert_allclose(adjusted, 1 - (1 - by_output) * (n - 1) / (n - 4), rtol=1e-5)
    with pytest.raises(ValueError, match="average of 'r2' must be one of"):
        r2(average="macro")


@pytest.mark.slow
def test_a_nan_target_that_has_weight_is_not_hidden():
    targets = np.array([1.0, np.nan, 3.0], np.float32)
    assert np.isnan(value_of(r2, np.zeros(3), targets))
    assert value_of(r2, np.zeros(3), targets, weights=np.array([1.0, 0, 1])) == -4.0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float16)])
def test_half_precision_outputs_are_computed_with_in_single_precision(dtype):
    outputs = jnp.arange(8).astype(dtype)
    targets = np.arange(8) + 0.01
    for metric, expected in (mse, 1e-4), (mae, 1e-2), (rmse, 1e-2), (r2, 1 - 1e-4 / 5.25):
        value = value_of(metric, outputs, targets.astype(np.float32))
        assert value == pytest.approx(expected, rel=1e-4)


def test_errors_of_unsigned_integers_do_not_wrap_around():
    assert value_of(mse, np.array([1], np.uint8), np.array([3], np.uint8)) == 4.0


def test_regression_refuses_shapes_that_would_broadcast():
    for metric in (mse, mae, rmse, r2):
        with pytest.raises(ValueError, match=r"got outputs \(4, 1\) and targets \(4,\)"):
            metric.measure(np.zeros((4, 1)), np.zeros(4))


def test_perplexity_is_the_exponential_of_the_mean_crossentropy(digits, measured):
    logits, labels, weights = digits
    likelihoods = np.exp(logits.astype(np.float64))
    probabilities = likelihoods / likelihoods.sum(1, keepdims=True)
    expected = np.exp(sklearn.metrics.log_loss(labels, probabilities, sample_weight=weights))
    for metric, outputs, targets in (
        (perplexity, logits, labels),
        (perplexity(from_logits=False), probabilities.astype(np.float32), labels),
    ):
        value = measured(metric, outputs, targets, weights=weights)
        assert value == pytest.approx(expected, rel=1e-5)
    large = np.array([[1e4, 1e4 + 1, 1e4 - 1]] * 2, np.float32)
    value = value_of(perplexity, large, np.array([1, 2]))
    assert value == pytest.approx(1 + np.e + 1 / np.e, rel=1e-5)
    assert value_of(perplexity, np.array([[0.0, 1e4]]), np.array([0])) == np.inf


@pytest.mark.parametrize("name", ["cosine_similarity", "CosineSimilarity"])
def test_cosine_similarity_by_name_is_1_where_directions_agree(name):
    metric = as_metrics([name])[name]
    assert metric.mode == "max"
    outputs, weights = np.array([[1.0, 2.0], [2.0, 0.0]], np.float32), np.array([3.0, 1.0])
    assert value_of(metric, outputs, 5 * outputs) == pytest.approx(1)
    targets = np.array([[1.0, 2.0], [-1.0, 0.0]], np.float32)
    assert value_of(metric, outputs, targets, weights=weights) == pytest.approx((3 - 1) / 4)
    columns = value_of(cosine_similarity(axis=1), outputs[..., None], targets[..., None])
    assert columns == pytest.approx(0, abs=1e-6)
