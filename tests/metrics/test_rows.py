"""Rows that a metric collects, and the names of the values computed of them."""

import numpy as np
import pytest

from flaxfit.metrics import collected
from flaxfit.metrics._rows import check_values, values_by_name


def test_values_by_name_have_the_name_of_the_metric_before_them_in_a_mapping():
    found = {"f1": 0.5, "recall": 0.25}
    metric = collected(lambda outputs, targets: found, name="scores")
    assert values_by_name("scores", metric, found) == found
    assert values_by_name("ner", metric, found) == {"ner_f1": 0.5, "ner_recall": 0.25}
    assert values_by_name("head_scores", metric, found) == {"head_f1": 0.5, "head_recall": 0.25}
    assert values_by_name("ner", metric, 0.5) == {"ner": 0.5}


def test_values_do_not_take_the_names_of_others():
    with pytest.raises(ValueError, match="'all' returned the key 'mse', which is already the name"):
        check_values({"mse": 1.0}, {"mse": 2.0}, "all")
    with pytest.raises(ValueError, match=r"returned the key 'loss'.*for 'all_loss'"):
        check_values({"loss": 1.0}, {}, "all")


def test_what_has_no_row_for_each_example_is_refused():
    outputs = {"out": np.ones(4), "scale": np.ones(3)}
    with pytest.raises(ValueError, match=r"one row per example, but got .* \(3,\) \(0/scale\)"):
        collected(lambda outputs, targets: 0.0).measure(outputs, np.ones(4), weights=np.ones(4))
