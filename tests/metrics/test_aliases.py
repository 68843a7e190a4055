import numpy as np
import pytest

from flaxfit.metrics import Metric, as_metrics
from flaxfit.metrics._aliases import ALIASES, known_as
from flaxfit.metrics._names import _BUILT_IN


def test_every_alias_is_of_a_metric_that_there_is():
    assert all(isinstance(as_metrics([name])[name], Metric) for name in ALIASES)
    assert not set(ALIASES) & set(_BUILT_IN)


@pytest.mark.parametrize(
    ("name", "ours"),
    [("AUC", "auc"), ("BinaryIoU", "binary_iou"), ("FBetaScore", "fbeta"), ("MSE", "mse")]
    + [("MeanIoU", "mean_iou"), ("kappa", "cohen_kappa"), ("jaccard_weighted", "iou_weighted")]
    + [("roc_auc", "auc"), ("sparse_categorical_accuracy", "accuracy")],
)
def test_names_of_other_libraries_are_known(name, ours):
    assert known_as(name) == ours


def test_a_loss_is_a_metric_by_its_name():
    logits, labels = np.zeros((2, 4)), np.array([0, 1])
    for name in "crossentropy", "sparse_categorical_crossentropy", "SparseCategoricalCrossentropy":
        metric = as_metrics([name])[name]
        assert metric.compute(metric.measure(logits, labels)) == pytest.approx(np.log(4))
        assert metric.mode == "min"
    ignoring = as_metrics(["crossentropy"])["crossentropy"](ignore_label=-1)
    assert ignoring.compute(ignoring.measure(logits, np.array([0, -1]))) == pytest.approx(np.log(4))


@pytest.mark.slow
def test_an_average_may_be_a_part_of_the_name():
    logits, labels = np.eye(3)[[0, 1, 1, 2]], np.array([0, 1, 2, 2])
    by_name = as_metrics(["f1_micro", "jaccard_macro"])
    assert list(by_name) == ["f1_micro", "jaccard_macro"]
    values = [metric.compute(metric.measure(logits, labels)) for metric in by_name.values()]
    assert values == pytest.approx([0.75, (1 + 0.5 + 0.5) / 3])


@pytest.mark.parametrize("name", ["mean", "Sum"])
def test_what_takes_other_values_is_refused_in_words(name):
    with pytest.raises(ValueError, match=f"metrics.{name.lower()}\\(f\\)"):
        as_metrics([name])
