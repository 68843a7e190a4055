"""Freezing leaves parameters out of gradients and optimizers, and puts them back."""

import optax
import pytest

from flaxfit.optim._freeze import (
    carry_over,
    check_matches,
    check_patterns,
    is_masked,
    listing,
    mask,
    merge,
)

PARAMS = {"stem": {"kernel": 1.0, "bias": 2.0}, "head": 3.0}


def test_what_is_masked_is_merged_back():
    masked = mask(PARAMS, ["stem/kernel", "head"])
    assert is_masked(masked["head"]) and is_masked(masked["stem"]["kernel"])
    assert masked["stem"]["bias"] == 2.0
    assert merge(masked, PARAMS) == PARAMS
    trained = {"stem": {"kernel": optax.MaskedNode(), "bias": 5.0}, "head": optax.MaskedNode()}
    assert merge(trained, PARAMS) == {"stem": {"kernel": 1.0, "bias": 5.0}, "head": 3.0}


def test_nothing_is_masked_without_patterns():
    assert mask(PARAMS, ()) == PARAMS


def test_leaves_are_carried_over_by_their_paths():
    old = {"stem": {"bias": 9.0}, "tail": 8.0}
    assert carry_over(old, PARAMS) == {"stem": {"kernel": 1.0, "bias": 9.0}, "head": 3.0}


def test_a_pattern_that_matches_no_whole_path_lists_the_parameters():
    check_matches("freeze", "stem/.*", PARAMS)
    with pytest.raises(ValueError, match=r"freeze: 'stem' matches no parameter.*(\n  .*){3}$"):
        check_matches("freeze", "stem", PARAMS)


def test_something_is_left_to_train():
    check_patterns(["stem/.*"], PARAMS)
    with pytest.raises(ValueError, match=r"freezes every parameter: .*nothing to train"):
        check_patterns(["stem/.*", "head"], PARAMS)
    with pytest.raises(ValueError, match="freeze: 'tail' matches no parameter"):
        check_patterns(["stem/.*", "tail"], PARAMS)


def test_a_long_listing_ends_with_the_number_of_the_rest():
    lines = listing([str(i) for i in range(1053)]).split("\n")
    assert lines[0] == "" and lines[1] == "  0" and lines[50] == "  49"
    assert lines[51:] == ["  ... and 1,003 more"]
