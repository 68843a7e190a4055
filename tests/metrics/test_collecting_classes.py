"""Metric classes of clu and metrax whose states do not add."""

import flax
import jax
import numpy as np
import pytest
import sklearn.metrics

import flaxfit as ff
from flaxfit.metrics import as_metrics, collected, on

STATE = ff.InferenceState(np.int32(0), {}, {})


@pytest.fixture
def average_precision(clu):
    @flax.struct.dataclass
    class AveragePrecision(clu.CollectingMetric.from_outputs(("labels", "logits"))):
        def compute(self):
            values = super().compute()
            return sklearn.metrics.average_precision_score(values["labels"], values["logits"])

    return AveragePrecision


def measure(metrics, *data, apply=lambda variables, x: x):
    """Over uneven batches on four devices."""
    task = ff.EvalTask(apply, metrics, ff.ArrayStream(*data, batch_size=64))
    return ff.EvalLoop(task, strategy=ff.DataParallel(jax.devices()[:4])).measure(STATE)


def test_a_collecting_metric_of_clu_is_taken_as_it_is(average_precision, tumours):
    scores, labels, weights = tumours
    weights = (weights > 1).astype(np.float32)
    found = measure([average_precision], scores, labels, weights)
    kept = weights > 0
    expected = sklearn.metrics.average_precision_score(labels[kept], scores[kept])
    assert found == {"AveragePrecision": pytest.approx(expected, rel=1e-12)}


def test_a_collection_of_clu_may_have_one(clu, average_precision, tumours):
    scores, labels, _ = tumours
    collection = clu.Collection.create(
        precision=average_precision, mean=clu.Average.from_output("logits")
    )
    found = measure(collection, scores + 1, labels)
    assert found["precision"] == sklearn.metrics.average_precision_score(labels, scores)
    assert found["mean"] == pytest.approx(np.mean(scores + 1), rel=1e-5)


def test_outputs_in_a_mapping_are_collected_by_their_names(clu, tumours):
    scores, labels, _ = tumours
    metric = clu.CollectingMetric.from_outputs(("scores", "labels"))
    found = measure({"all": metric}, scores, labels, apply=lambda v, x: {"scores": x, "more": -x})
    np.testing.assert_array_equal(found["all_scores"], scores)
    np.testing.assert_array_equal(found["all_labels"], labels)


def test_an_output_that_is_not_there_is_named(clu):
    metric = as_metrics([clu.CollectingMetric.from_outputs(("loss",))])["FromOutputs"]
    with pytest.raises(ValueError, match="asks for the model output 'loss', and .* logits, labels"):
        metric.measure(np.ones(4), np.ones(4))


def test_a_class_that_cannot_merge_is_computed_of_all_rows(metrax, tumours):
    scores, labels, _ = tumours
    metric = on(lambda scores, labels: (jax.nn.sigmoid(scores), labels), metrax.FBetaScore)
    expected = sklearn.metrics.f1_score(labels, scores > 0)
    assert measure([metric], scores, labels) == {"FBetaScore": pytest.approx(expected, rel=1e-5)}


def test_the_bound_of_a_class_is_raised_by_collected(average_precision):
    metric = collected(average_precision, max_rows=7, name="precision", mode="max")
    assert (metric.max_rows, metric.name, metric.mode) == (7, "precision", "max")
    assert as_metrics([average_precision])["AveragePrecision"].max_rows == 1_000_000


def test_any_metric_class_may_be_computed_of_all_rows(metrax, tumours):
    scores, labels, weights = tumours
    kept = (weights > 1).astype(np.float32)
    found = measure([collected(metrax.MSE)], scores, labels, kept)
    expected = sklearn.metrics.mean_squared_error(labels, scores, sample_weight=kept)
    assert found == {"MSE": pytest.approx(expected, rel=1e-5)}
    with pytest.raises(ValueError, match="does not fit the 2 outputs and targets"):
        measure([collected(metrax.PrecisionAtK)], scores, labels)


def test_weights_that_a_class_cannot_take_are_warned_of(average_precision, metrax, tumours):
    scores, labels, weights = tumours
    for each in (average_precision, metrax.FBetaScore):
        with pytest.warns(UserWarning, match=f"the metric '{each.__name__}' takes none"):
            measure([each], scores, labels, weights)
