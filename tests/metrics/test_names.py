from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from measuring import value_of

from flaxfit.metrics import Metric, accuracy, as_metrics, auc, confusion_matrix, mse, on, top_k

LOGITS = np.array([[0.1, 0.7, 0.2], [0.3, 0.5, 0.2]], np.float32)
LABELS = np.array([1, 2], np.int32)


def compute(metric, *arrays):
    return metric.compute(metric.measure(*arrays))


def test_a_sequence_takes_the_names_of_its_metrics():
    def margin(outputs, targets):
        return outputs.max(-1)

    metrics = as_metrics(["acc", accuracy, top_k(2), margin, confusion_matrix(3)])
    assert list(metrics) == ["acc", "accuracy", "top_2", "margin", "confusion_matrix"]
    assert metrics["acc"] is metrics["accuracy"] is accuracy
    assert compute(metrics["margin"], LOGITS, LABELS) == pytest.approx(0.6)


def test_metrics_are_given_as_a_mapping_alone_or_not_at_all():
    metrics = as_metrics({"b": "mse", "a": auc, "c": lambda outputs, targets: outputs})
    assert list(metrics) == ["b", "a", "c"] and metrics["b"] is mse
    assert as_metrics(metrics) == metrics
    assert as_metrics("accuracy") == as_metrics(accuracy) == {"accuracy": accuracy}
    assert as_metrics(()) == as_metrics({}) == as_metrics(None) == {}


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("acuracy", "accuracy"), ("f_1", "f1"), ("precison", "precision"), ("f1_wieghted", "f1")],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"no metric {name!r}. Did you mean .*{nearest}"):
        as_metrics([name])
    with pytest.raises(ValueError, match="no metric 'xyzzy'. Usual names are accuracy, f1, auc"):
        as_metrics(["xyzzy"])


@pytest.mark.parametrize(
    "name", ["loss", "grad_norm", "hooked_grad_norm", "penalty", "skipped_steps", "learning_rate"]
)
def test_the_names_of_the_loops_own_numbers_are_refused(name):
    with pytest.raises(ValueError, match=f"cannot be called '{name}'"):
        as_metrics({name: "mse"})


def test_names_of_validation_and_names_that_are_taken_are_refused():
    with pytest.raises(ValueError, match="'val_mae': it would pass for a number of validation"):
        as_metrics({"val_mae": "mse", "mae": "mae"})
    assert as_metrics({"value": "mse"}).keys() == {"value"}
    with pytest.raises(ValueError, match="Two metrics are called 'top_2'"):
        as_metrics(["top_2", top_k(2)])


@pytest.mark.parametrize("named", [["loss"], {"loss": "mse"}])
def test_the_loss_is_no_metric_but_given_as_such(named):
    with pytest.raises(ValueError, match=r"given as such: EvalTask\(\.\.\., loss=\.\.\.\)"):
        as_metrics(named)


def test_a_metric_without_a_name_is_refused_in_a_list():
    for nameless in (lambda outputs, targets: outputs, Metric(jnp.sum, float)):
        with pytest.raises(ValueError, match="has no name: pass a mapping"):
            as_metrics([nameless])


def test_what_is_no_metric_is_refused():
    nonsense: Any = {"three": 3}
    with pytest.raises(TypeError, match="must be a Metric, a name.*got int: 3"):
        as_metrics(nonsense)
    unnamed: Any = {3: "mse"}
    with pytest.raises(TypeError, match="name of a metric must be a string, got int: 3"):
        as_metrics(unnamed)


def test_on_measures_one_of_several_outputs_with_the_weights():
    first = on(lambda a, b, targets_a, targets_b: (a, targets_a), "mse")
    a, b = np.array([1.0, 3.0], np.float32), np.zeros(2)
    sums = first.measure(a, b, np.zeros(2, np.float32), b, weights=np.array([3.0, 1.0]))
    assert first.compute(sums) == pytest.approx((3 * 1 + 9) / 4)
    assert first.name == "mse"


class Updated:
    def update(self, **values):
        pass

    def compute(self):
        return 0.0


@pytest.mark.parametrize("of", [Updated, Updated()])
def test_metrics_that_are_updated_in_place_are_refused(of):
    with pytest.raises(TypeError, match="Cannot use the metric .*by name, such as 'accuracy'"):
        as_metrics([of])


def test_a_list_for_each_output_is_answered_with_a_mapping():
    nested: Any = [["accuracy"], ["mae"]]
    with pytest.raises(TypeError, match=r"list in a list of metrics.*metrics=\{'a': \['mae'\]"):
        as_metrics(nested)


def test_a_maker_of_metrics_that_is_not_called_is_refused():
    with pytest.raises(TypeError, match=r"call it, flaxfit\.metrics\.confusion_matrix\(\.\.\.\)"):
        as_metrics([confusion_matrix])
    assert list(as_metrics([accuracy])) == ["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("roc_auc_ovr", {"multi_class": "ovr"}),
        ("auc_ovr_weighted", {"multi_class": "ovr", "average": "weighted"}),
    ],
)
def test_areas_of_several_classes_have_the_names_of_scikit_learn(name, options):
    outputs = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    labels = np.arange(20) % 7 % 3
    found = as_metrics([name])[name]
    assert value_of(found, outputs, labels) == value_of(auc(**options), outputs, labels)
    with pytest.raises(ValueError, match="must be 'ovr' .* got 'ovo'"):
        as_metrics(["roc_auc_ovo"])


@pytest.mark.parametrize("own", ["mean_squared_error", "root_mean_squared_error", "log_loss"])
def test_a_negated_name_is_answered_with_the_error_and_its_mode(own):
    with pytest.raises(ValueError, match=f"no metric 'neg_{own}'.*'{own}'.*'val_{own}'.*'min'"):
        as_metrics([f"neg_{own}"])
    with pytest.raises(ValueError, match="no metric 'neg_f1'"):
        as_metrics(["neg_f1"])
