"""Metric objects of Keras, and options that it has, beside what it computes."""

import numpy as np
import pytest
from measuring import value_of

from flaxfit.metrics import (
    as_metrics,
    auc,
    concordance,
    pearson,
    precision_at_recall,
    r2,
    specificity_at_sensitivity,
)

pytestmark = pytest.mark.slow
GENERATOR = np.random.default_rng(0)
OUTPUTS, TARGETS = GENERATOR.normal(size=(2, 60, 3)).astype(np.float32)
SHARES, MARKS = 1 / (1 + np.exp(-OUTPUTS)), (OUTPUTS + TARGETS > 0).astype(np.int32)


def reported(metric, targets, outputs):
    metric.update_state(targets, outputs)
    return np.asarray(metric.result())


@pytest.mark.parametrize(
    "options", [{"class_aggregation": None}, {"class_aggregation": "variance_weighted_average"}]
)
def test_r2_has_the_averages_of_keras(keras, options):
    expected = reported(keras.metrics.R2Score(**options), TARGETS, OUTPUTS)
    assert value_of(r2(**options), OUTPUTS, TARGETS) == pytest.approx(expected, abs=1e-5)


def test_r2_is_adjusted_as_in_keras(keras):
    one = np.s_[:, :1]
    expected = reported(keras.metrics.R2Score(num_regressors=4), TARGETS[one], OUTPUTS[one])
    found = value_of(r2(num_regressors=4), OUTPUTS[one], TARGETS[one])
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("metric", "name"), [(pearson, "PearsonCorrelation"), (concordance, "ConcordanceCorrelation")]
)
def test_correlations_along_an_axis_are_those_of_keras(keras, metric, name):
    expected = reported(getattr(keras.metrics, name)(), TARGETS, OUTPUTS)
    assert value_of(metric(axis=-1), OUTPUTS, TARGETS) == pytest.approx(expected, abs=1e-4)


def test_labels_of_an_area_have_weights(keras):
    of_keras = keras.metrics.AUC(multi_label=True, label_weights=[1.0, 2, 3], num_thresholds=4000)
    expected = reported(of_keras, MARKS, SHARES)
    found = value_of(auc(multi_label=True, label_weights=[1, 2, 3]), SHARES, MARKS)
    assert found == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize(
    ("metric", "name", "option"),
    [
        (precision_at_recall, "PrecisionAtRecall", "recall"),
        (specificity_at_sensitivity, "SpecificityAtSensitivity", "sensitivity"),
    ],
)
def test_a_rate_at_another_is_of_one_label(keras, metric, name, option):
    of_keras = getattr(keras.metrics, name)(0.6, class_id=2, num_thresholds=4000)
    expected = reported(of_keras, MARKS, SHARES)
    options = {option: 0.6, "class_id": 2, "multilabel": True}
    assert value_of(metric(**options), OUTPUTS, MARKS) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda of: of.AUC(), r"metrics\.auc\(from_logits=False\) or a name, metrics=\['auc'\]"),
        (lambda of: of.AUC(curve="PR"), r"use flaxfit\.metrics\.pr_auc or"),
        (lambda of: of.TopKCategoricalAccuracy(3), r"top_k\(k=3\) or a name, metrics=\['top_3'\]"),
        (lambda of: of.F1Score, r"use flaxfit\.metrics\.f1 or"),
        (lambda of: of.F1Score(average="macro"), r"use flaxfit\.metrics\.f1\(average='macro'\) or"),
        (lambda of: of.Precision(0.3), r"flaxfit\.metrics\.precision\(threshold=0\.3\) or"),
        (lambda of: of.PrecisionAtRecall(0.7), r"precision_at_recall\(least=0\.7\) or"),
        (lambda of: of.KLDivergence(), r"use flaxfit\.losses\.kl_divergence or"),
    ],
)
def test_metrics_of_keras_are_refused_by_name(keras, make, words):
    with pytest.raises(TypeError, match=words):
        as_metrics([make(keras.metrics)])
