import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxfit.metrics import (
    Metric,
    accuracy,
    auc,
    collected,
    cosine_similarity,
    f1,
    fbeta,
    mean,
    mse,
    precision,
    spearman,
)
from flaxfit.metrics import sum as metrics_sum

OUTPUTS = np.arange(12, dtype=np.float32).reshape(4, 3)
TARGETS = np.ones((4, 3), np.float32)
WEIGHTS = np.array([1.0, 0.0, 2.0, 0.5], np.float32)


def test_a_function_becomes_the_weighted_mean_of_all_its_values():
    difference = mean(lambda outputs, targets: outputs - targets)
    value = difference.compute(difference.measure(OUTPUTS, TARGETS, weights=WEIGHTS))
    expected = np.average((OUTPUTS - TARGETS).mean(1), weights=WEIGHTS)
    assert value == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("filling", [np.nan, np.inf, -np.inf])
def test_a_row_of_weight_zero_leaves_no_mark(filling):
    outputs = OUTPUTS.copy()
    outputs[1] = filling
    spoilt = mse.compute(mse.measure(outputs, TARGETS, weights=WEIGHTS))
    assert spoilt == mse.compute(mse.measure(OUTPUTS, TARGETS, weights=WEIGHTS))


def test_a_nan_that_has_weight_is_not_hidden():
    outputs = OUTPUTS.copy()
    outputs[2] = np.nan
    assert np.isnan(mse.compute(mse.measure(outputs, TARGETS, weights=WEIGHTS)))


def test_no_weight_at_all_gives_nan_quietly():
    assert np.isnan(mse.compute(mse.measure(OUTPUTS, TARGETS, weights=np.zeros(4, np.float32))))


def test_half_precision_values_are_added_in_single_precision():
    ones = mean(lambda outputs: outputs)
    sums = ones.measure(jnp.ones(4096, jnp.bfloat16))
    assert sums["sum"].dtype == jnp.float32
    assert ones.compute(jax.device_get(sums)) == 1.0


def test_a_function_that_takes_the_mean_itself_is_refused():
    with pytest.raises(ValueError, match="'already' returned a scalar; expected one value per ex"):
        mean(lambda outputs, targets: jnp.mean(outputs), name="already").measure(OUTPUTS, TARGETS)
    with pytest.raises(ValueError, match=r"metrics.collected\(f\) for a function of all outputs"):
        mean(lambda outputs, targets: outputs.mean()).measure(OUTPUTS, TARGETS)


def test_values_that_are_not_per_example_do_not_take_weights():
    by_column = mean(lambda outputs, targets: outputs.mean(0))
    with pytest.raises(ValueError, match=r"values of shape \(3,\) and weights of shape \(4,\)"):
        by_column.measure(OUTPUTS, TARGETS, weights=WEIGHTS)


def test_calling_a_metric_sets_its_options():
    assert f1(average="macro").name == "f1"
    assert accuracy() is accuracy
    with pytest.raises(TypeError, match="'accuracy' has no option average: it has threshold"):
        accuracy(average="macro")
    with pytest.raises(TypeError, match=r"by name, such as n_bins=\.\.\., and makes a metric"):
        auc(0.5)
    with pytest.raises(TypeError, match=r"no option curve: .*flaxfit\.metrics\.pr_auc"):
        auc(curve="PR")
    with pytest.raises(TypeError, match="'mse' has no option threshold: it has none"):
        mse(threshold=0.5)


def test_an_ignored_label_of_any_metric_of_one_target_does_not_count():
    outputs, targets = np.eye(3, dtype=np.float32), np.array([0, -100, 1])
    ignoring = accuracy(ignore_label=-100)
    assert ignoring.compute(ignoring.measure(outputs, targets)) == 0.5
    weighted = ignoring.measure(outputs, targets, weights=np.array([3.0, 9.0, 1.0]))
    assert ignoring.compute(weighted) == 0.75
    assert accuracy(threshold=0.5, ignore_label=-100).name == "accuracy"
    for metric in mean(lambda outputs, targets: targets, name="targets"), spearman:
        assert metric(ignore_label=None) is metric


def test_values_may_come_with_weights():
    masked = mean(lambda outputs, targets: (outputs, targets), name="masked")
    values, mask = np.array([[1.0, 5.0], [3.0, 7.0]]), np.array([[1, 0], [1, 1]])
    assert masked.compute(masked.measure(values, mask)) == pytest.approx(11 / 3)
    weighted = masked.measure(values, mask, weights=np.array([2.0, 0.0]))
    assert masked.compute(weighted) == 1


def test_an_ignored_label_goes_with_other_options_and_not_with_collected_rows():
    ignoring = f1(ignore_label=-100)(average="macro")
    targets, outputs = np.array([0, -100, 1]), np.eye(3, dtype=np.float32)
    # Of three classes, one is right, one missed and one wrongly predicted.
    assert ignoring.compute(ignoring.measure(outputs, targets)) == pytest.approx(1 / 3)
    with pytest.raises(TypeError, match="no option ignore_label: leave such targets out"):
        collected(lambda outputs, targets: 0.0, name="rows")(ignore_label=-100)
    with pytest.raises(TypeError, match="'spearman' has no option .* or give them the weight 0"):
        spearman(ignore_label=-100)
    vectors = cosine_similarity(ignore_label=-100)
    with pytest.raises(ValueError, match="do not broadcast"):
        vectors.measure(outputs, outputs)


def test_a_sum_is_not_divided():
    def cost(outputs, targets):
        return outputs * targets

    metric = metrics_sum(cost, mode="min")
    sums = metric.measure(np.ones(2), np.array([1.0, 2.0]), weights=np.array([1.0, 3.0]))
    assert (metric.compute(sums), metric.name, metric.mode) == (7.0, "cost", "min")


def test_a_metric_may_be_given_a_name():
    assert precision(class_id=1, name="of_cats").name == "of_cats"
    assert mse(name="error").name == "error"
    assert f1(name="of_all")(average="micro").name == "of_all"


@pytest.mark.slow
def test_options_add_to_those_that_a_metric_has():
    outputs, targets = np.eye(3, dtype=np.float32)[[0, 1, 2, 2, 1]], np.array([0, 1, 2, 0, 0])
    both = fbeta(beta=2.0, average="micro", zero_division=1.0)
    of_class = fbeta(beta=2.0, class_id=0)
    for expected, found in (
        (both, fbeta(beta=2.0)(average="micro")(zero_division=1.0)),
        (of_class, fbeta(class_id=0)(beta=2.0)),
        (of_class, fbeta(class_id=0, beta=0.5)(beta=2.0)),
    ):
        value = expected.compute(expected.measure(outputs, targets))
        assert found.compute(found.measure(outputs, targets)) == value
    once = of_class.compute(of_class.measure(outputs, targets))
    assert once == pytest.approx(5 / 13)  # One right and two missed: 5 / (5 + 4 * 2).


def test_words_of_keras_are_taken_for_options_that_have_another_name():
    metric = precision(thresholds=1.0, name=None, dtype=None)
    scores = np.array([0.5, 2.0])
    assert metric.compute(metric.measure(scores, np.array([0, 1]))) == 1.0
    with pytest.raises(TypeError, match="threshold and thresholds are the same"):
        precision(thresholds=1.0, threshold=0.5)
    with pytest.raises(TypeError, match="has no option dtype"):
        precision(dtype="float16")


def test_the_repr_of_a_metric_is_its_name():
    assert repr(precision(threshold=0.5)) == "Metric(precision)"
    assert repr(Metric(np.argmax, np.sum)) == "Metric(argmax)"
