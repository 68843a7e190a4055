"""Paths of trees, and rules over them: whole paths, and the first rule that matches."""

from typing import NamedTuple

import pytest

from flaxfit.tree._paths import flat, label, match


class Pair(NamedTuple):
    first: object
    second: object


TREE = {"encoder": {"kernel": 1, "bias": 2}, "moments": Pair([3, 4], ())}


def test_leaves_are_named_by_keys_fields_and_indices_in_the_order_of_the_tree():
    assert [*flat(TREE).items()] == [
        ("encoder/bias", 2),
        ("encoder/kernel", 1),
        ("moments/first/0", 3),
        ("moments/first/1", 4),
    ]


@pytest.mark.parametrize(
    ("path", "value"),
    [("encoder/bias", "bias"), ("encoder/kernel", "encoder"), ("my/encoder/kernel", None)],
)
def test_the_first_rule_that_matches_the_whole_path_decides(path, value):
    assert match([(".*/bias", "bias"), ("encoder/.*", "encoder")], path) == value


def test_every_leaf_gets_the_value_of_its_rule_or_the_default():
    labels = label([("moments/.*", True)], TREE, False)
    assert labels == {
        "encoder": {"kernel": False, "bias": False},
        "moments": Pair([True, True], ()),
    }
