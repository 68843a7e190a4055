"""Filters assign parameters to groups."""

import re

import numpy as np
import pytest

from flaxfit.optim._filters import assign, group_name

PARAMS = {
    "encoder": {"kernel": np.ones((2, 2)), "bias": np.ones(2)},
    "head": {"kernel": np.ones((2, 1)), "bias": np.ones(1)},
}


class Heads:
    """Selects the part of a tree called head."""

    def iterate(self, inputs):
        yield inputs["head"]

    def update(self, fn, inputs):
        return {**inputs, "head": fn(inputs["head"])}


@pytest.mark.parametrize(
    "filter",
    [
        "head/.*",
        re.compile(r"head/\w+"),
        lambda path, value: path.startswith("head/"),
        lambda path, value: value.shape[-1] == 1,
        Heads(),
    ],
    ids=["text", "pattern", "path", "value", "traversal"],
)
def test_every_kind_of_filter_chooses_the_same(filter):
    assert assign([filter], ["it"], PARAMS) == {"encoder": 1, "head": 0}


def test_a_dict_of_one_group_has_one_label_and_others_have_one_each():
    assert assign([".*/kernel", "encoder/bias"], ["k", "b"], PARAMS) == {
        "encoder": {"kernel": 0, "bias": 1},
        "head": {"kernel": 0, "bias": 2},
    }
    assert assign([".*"], ["all"], PARAMS) == 0


def test_patterns_match_whole_paths():
    with pytest.raises(ValueError, match=r"'head' matches no parameter.*:(\n  .*){4}$"):
        assign(["head"], ["head"], PARAMS)


def test_a_parameter_of_two_groups_is_named_with_both():
    with pytest.raises(ValueError, match=r"\n  head/kernel \(groups 'k', 'h'\)$"):
        assign([".*kernel", "head/kernel"], ["k", "h"], PARAMS)


def test_a_tree_without_parameters_has_none_to_match():
    assert assign(["head/.*"], ["head"], {}) == {}


@pytest.mark.parametrize(
    ("filter", "name"),
    [("a/.*", "a/.*"), (re.compile("b"), "b"), (lambda path, value: True, "3"), (Heads(), "3")],
    ids=["text", "pattern", "function", "traversal"],
)
def test_a_group_has_the_name_of_its_pattern_or_its_position(filter, name):
    assert group_name(3, filter) == name


@pytest.mark.parametrize(
    ("filter", "error", "message"),
    [
        ("a(", ValueError, r"Group 3 has no valid pattern: 'a\('"),
        (7, TypeError, "got 7 for group 3"),
    ],
)
def test_what_is_no_filter_is_refused_in_words(filter, error, message):
    with pytest.raises(error, match=message):
        group_name(3, filter)
