"""Metrics of all outputs at once, as functions of rows; how rows are kept is tested in the loop."""

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from flaxfit.metrics import as_metrics, collected, on

OUTPUTS, TARGETS = np.array([1.0, 2.0, 4.0, 3.0]), np.array([2.0, 1.0, 5.0, 9.0])


def spearman(outputs, targets):
    return scipy.stats.spearmanr(outputs, targets).statistic


def value_of(metric, *arguments, weights=None):
    return metric.compute(metric.measure(*arguments, weights=weights))


def test_it_gives_the_value_of_its_function_by_its_name_unless_another_is_given():
    value = value_of(collected(spearman), OUTPUTS, TARGETS)
    assert type(value) is float and value == spearman(OUTPUTS, TARGETS)
    assert np.isnan(value_of(collected(spearman), OUTPUTS[:0], TARGETS[:0]))
    assert [*as_metrics([collected(spearman), collected(spearman, name="rank")])] == [
        "spearman",
        "rank",
    ]
    with pytest.raises(ValueError, match="A metric in a list has no name"):
        as_metrics([collected(lambda outputs, targets: 0.0)])


def test_a_function_with_weights_is_given_them():
    def mean(outputs, targets, weights):
        return np.average(outputs - targets, weights=weights)

    weights = np.array([1.0, 2.0, 0.5, 3.0])
    expected = np.average(OUTPUTS - TARGETS, weights=weights)
    assert value_of(collected(mean), OUTPUTS, TARGETS, weights=weights) == expected


def test_a_function_without_weights_warns_that_it_counts_all_the_same():
    metric = collected(spearman)
    with pytest.warns(UserWarning, match="the metric 'spearman' takes none: it leaves out"):
        value = value_of(metric, OUTPUTS, TARGETS, weights=np.array([1.0, 2.0, 1.0, 1.0]))
    assert value == spearman(OUTPUTS, TARGETS)


def test_on_picks_what_is_kept():
    metric = on(lambda outputs, targets: (outputs["scores"], targets), collected(spearman))
    rows = metric.measure({"scores": OUTPUTS, "wide": np.ones((4, 100))}, TARGETS)
    assert [each.shape for each in rows["arguments"]] == [(4,), (4,)]
    assert metric.compute(rows) == spearman(OUTPUTS, TARGETS)
    assert (metric.name, metric.max_rows) == ("spearman", 1_000_000)


def test_an_array_stays_one():
    def table(outputs, targets):
        return {"table": sklearn.metrics.confusion_matrix(targets > 3, outputs > 3)}

    np.testing.assert_array_equal(
        value_of(collected(table), OUTPUTS, TARGETS)["table"], [[2, 0], [1, 1]]
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "returned NoneType"),
        ("0.5", "returned str"),
        (scipy.stats.spearmanr(OUTPUTS, TARGETS), r"returned SignificanceResult.*\.statistic"),
        ({"a": {"b": 1.0}}, r"metric it\['a'\] returned dict"),
        (np.array(["a"]), "returned ndarray"),
    ],
)
def test_what_is_no_number_is_refused(value, words):
    metric = collected(lambda outputs, targets: value, name="it")
    with pytest.raises(TypeError, match=words):
        value_of(metric, OUTPUTS, TARGETS)


def test_a_function_of_targets_first_is_refused():
    with pytest.raises(TypeError, match=r"takes \(y_true, y_score\). Wrap it: lambda outputs"):
        collected(sklearn.metrics.roc_auc_score)
    with pytest.raises(TypeError, match=r"cannot trace roc_auc_score .*metrics.collected"):
        as_metrics([sklearn.metrics.roc_auc_score])


def test_a_function_of_other_arguments_is_refused():
    def compute_metrics(pair):
        return spearman(*pair)

    with pytest.raises(TypeError, match=r"2 of them.*compute_metrics\(\(outputs, targets\)\)"):
        collected(compute_metrics).measure(OUTPUTS, TARGETS)


def test_its_options_are_checked():
    with pytest.raises(TypeError, match="collected needs a function"):
        collected("spearman")
    with pytest.raises(ValueError, match="max_rows must be 1 or more"):
        collected(spearman, max_rows=0)
    with pytest.raises(ValueError, match="mode must be 'min', 'max' or None"):
        collected(spearman, mode="up")
