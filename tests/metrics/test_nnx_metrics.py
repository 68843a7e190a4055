import numpy as np
import pytest
import sklearn.metrics
from flax import nnx

from flaxfit.metrics import accuracy, as_metrics, mse


def test_accuracy_is_that_of_nnx_and_is_weighted(digits, measured):
    logits, labels, weights = digits
    given = nnx.metrics.Accuracy()
    metric = as_metrics([given])["accuracy"]
    expected = sklearn.metrics.accuracy_score(labels, logits.argmax(1), sample_weight=weights)
    assert measured(metric, logits, labels, weights=weights) == pytest.approx(expected, rel=1e-6)
    assert np.isnan(given.compute())  # It is not updated.
    given.update(logits=logits, labels=labels)
    assert measured(metric, logits, labels) == pytest.approx(float(given.compute()), rel=1e-6)


def test_a_threshold_is_met_by_a_logit_that_equals_it(tumours, measured):
    scores, labels, weights = tumours
    scores = scores.round(1)
    threshold = float(np.float32(0.3))
    given = nnx.metrics.Accuracy(threshold=threshold)
    metric = as_metrics({"right": given})["right"]
    assert (scores == np.float32(threshold)).any() and metric.mode == "max"
    given.update(logits=scores, labels=labels)
    assert measured(metric, scores, labels) == pytest.approx(float(given.compute()), rel=1e-6)
    expected = np.average((scores >= threshold) == (labels > 0), weights=weights)
    assert measured(metric, scores, labels, weights=weights) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match=r"labels of the same shape, got \(569, 1\) and \(569,\)"):
        metric.measure(scores[:, None], labels)


@pytest.mark.parametrize(
    "loss", [nnx.metrics.Average("loss"), nnx.metrics.Average()], ids=["loss", "values"]
)
def test_a_multi_metric_is_a_mapping_and_its_loss_is_left_to_the_loop(loss):
    multi = nnx.MultiMetric(right=nnx.metrics.Accuracy(), loss=loss)
    assert as_metrics(multi) == {"right": accuracy}
    assert as_metrics(nnx.metrics.Accuracy) == as_metrics([nnx.metrics.Accuracy])
    assert as_metrics(["mse", nnx.metrics.Accuracy()]) == {"mse": mse, "accuracy": accuracy}


class Precise(nnx.metrics.Accuracy):
    def compute(self):
        return self.total[...]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (nnx.metrics.Average("loss"), "Pass the function that computes it"),
        (nnx.metrics.Welford(), "running mean and variance, which are not sums"),
        (nnx.MultiMetric(a=nnx.metrics.Accuracy()), r"alone, as metrics=nnx.MultiMetric\("),
        (Precise, "Precise is updated in place by its own code. Use a function"),
    ],
    ids=["average", "welford", "multi", "own"],
)
def test_others_are_refused_with_what_to_use(given, message):
    for metrics in ([given], {"it": given}):
        with pytest.raises(TypeError, match=f"Cannot use this metric of NNX: .*{message}"):
            as_metrics(metrics)
    with pytest.raises(TypeError, match="Cannot use this metric of NNX"):
        as_metrics(nnx.MultiMetric(it=given))
